"""The command ``evenflow``. It reads flags, and turns every failure into one line and a code.

Exit codes: 0 done, 1 it failed, 2 it was asked for wrongly. Nothing heavy is imported here, so that
``--help`` answers at once.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from serving import console
from serving.config import Config, ConfigError, load_config, served_name
from serving.service import (
    Service,
    ServiceError,
    Stopped,
    drain_worker,
    fetch_explanation,
    fetch_status,
    scale_pool,
    set_role,
)

DEFAULT_URL = "http://127.0.0.1:8000"
NESTED = {
    "scaling": ("mixed", "prefill", "decode", "max_workers"),
    "slo": ("ttft", "itl"),
    "tls": ("cert", "key", "client_ca"),
}
DEMO_PORTS = {"http_port": 0, "grpc_port": 0}

app = typer.Typer(
    help="Serve large language models so that tokens flow evenly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Flag = typer.Option
ModelFlag = Annotated[
    str | None, Flag(help="Model folder, .gguf file or Hugging Face id. Default: the demo model.")
]
UrlFlag = Annotated[str, Flag(help="Address of a running Evenflow.")]
JsonFlag = Annotated[bool, Flag("--json", help="For machines: JSON instead of a table.")]


def main() -> None:
    app()


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a person can mend ends as one line; a signal ends without one."""
    try:
        yield
    except ConfigError as error:
        console.problem(str(error))
        raise typer.Exit(2) from None
    except ServiceError as error:
        console.problem(str(error))
        raise typer.Exit(1) from None
    except Stopped:
        raise typer.Exit(0) from None


@app.command()
def serve(
    model: ModelFlag = None,
    served_model_name: Annotated[str | None, Flag(help="What clients call the model.")] = None,
    dtype: Annotated[str | None, Flag(help="auto, float32 or bfloat16.")] = None,
    device: Annotated[str | None, Flag(help="auto, cpu or cuda.")] = None,
    mixed: Annotated[int | None, Flag(help="Workers that prefill and decode. [1]")] = None,
    prefill: Annotated[int | None, Flag(help="Workers that prefer to prefill. [1]")] = None,
    decode: Annotated[int | None, Flag(help="Workers that prefer to decode. [0]")] = None,
    scaling_mixed: Annotated[str | None, Flag(help="Range that follows demand: 1-4.")] = None,
    scaling_prefill: Annotated[str | None, Flag(help="As --scaling-mixed.")] = None,
    scaling_decode: Annotated[str | None, Flag(help="As --scaling-mixed.")] = None,
    scaling_max_workers: Annotated[int | None, Flag(help="Over all pools.")] = None,
    threads: Annotated[int | None, Flag(help="Of one worker on a CPU. [cores / workers]")] = None,
    policy: Annotated[
        str | None, Flag(help="chunked, splitfuse, prefill-first or static. [chunked]")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, Flag(help="A fixed token budget of one step. [by the promised gaps]")
    ] = None,
    max_num_seqs: Annotated[int | None, Flag(help="Requests in one batch. [64]")] = None,
    page_size: Annotated[
        int | None, Flag(help="Tokens per KV page. [16 on a CPU, 256 on a GPU]")
    ] = None,
    num_pages: Annotated[int | None, Flag(help="KV pages of one worker. [by memory]")] = None,
    max_model_len: Annotated[int | None, Flag(help="Longest context. [the model's]")] = None,
    host: Annotated[str | None, Flag(help="Where to listen. [127.0.0.1]")] = None,
    http_port: Annotated[int | None, Flag(help="[8000]; 0 takes a free one.")] = None,
    grpc_port: Annotated[int | None, Flag(help="[9000]; 0 takes a free one.")] = None,
    slo_ttft: Annotated[str | None, Flag(help="Promised time to first token. [2s]")] = None,
    slo_itl: Annotated[str | None, Flag(help="Promised gap between tokens. [100ms]")] = None,
    state: Annotated[str | None, Flag(help="memory, or redis://host:6379 to share it.")] = None,
    record: Annotated[
        str | None, Flag(help="Append arrivals and lengths, no contents, for `evenflow plan`.")
    ] = None,
    tracing: Annotated[
        str | None, Flag(help="Send OpenTelemetry traces there: http://collector:4318.")
    ] = None,
    ray: Annotated[
        str | None, Flag(help="auto (join a running Ray or start one), local, or an address.")
    ] = None,
    api_keys: Annotated[
        str | None, Flag(help="A file of key hashes (see `evenflow key`): only these may.")
    ] = None,
    tls_cert: Annotated[str | None, Flag(help="PEM file: TLS on both ports.")] = None,
    tls_key: Annotated[str | None, Flag(help="PEM file of the certificate's key.")] = None,
    tls_client_ca: Annotated[str | None, Flag(help="PEM file: clients need certificates.")] = None,
    insecure: Annotated[
        bool | None, Flag("--insecure", help="Listen on a network without TLS and keys.")
    ] = None,
    debug: Annotated[bool | None, Flag(help="Page ledgers and pinned workers, for tests.")] = None,
    config: Annotated[Path | None, Flag(help="A YAML file with these and more keys.")] = None,
) -> None:
    """Start or join Ray, deploy, and serve until Ctrl-C."""
    flags = {key: value for key, value in locals().items() if key != "config"}
    for section, names in NESTED.items():
        for name in names:
            flags[f"{section}.{name}"] = flags.pop(f"{section}_{name}")
    with plain_errors():
        _serve(load_config(config, flags))


def _serve(config: Config) -> None:
    with console.Progress() as progress, Service(config, progress.say) as service:
        progress.close()
        console.welcome(service.config, served_name(config), service.url, service.grpc_address)
        service.watch()


@app.command()
def demo(
    model: ModelFlag = None,
    url: Annotated[str | None, Flag(help="Use a running Evenflow instead of starting one.")] = None,
    streams: Annotated[int, Flag(min=1, max=64, help="Chats at the same time.")] = 8,
    prompt_tokens: Annotated[int, Flag(min=100, help="Length of the long prompt.")] = 4000,
    as_json: JsonFlag = False,
) -> None:
    """Watch eight chats stream while somebody else's 4,000-token prompt is prefilled."""
    with plain_errors(), ExitStack() as stack:
        if url is None:
            progress = stack.enter_context(console.Progress())
            config = load_config(None, {"model": model, "ray": "local", **DEMO_PORTS})
            url = stack.enter_context(Service(config, progress.say)).url
            progress.close()
        _demo(url, streams, prompt_tokens, as_json)


def _demo(url: str, streams: int, prompt_tokens: int, as_json: bool) -> None:
    from serving import console_demo
    from serving.demo import Demo

    results = console_demo.run(Demo(url, streams, prompt_tokens))
    if as_json:
        console.out.print_json(json.dumps([result.summary() for result in results]))
    else:
        console_demo.show(results)


@app.command()
def status(url: UrlFlag = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """The workers of a running Evenflow and their load."""
    with plain_errors():
        answer = fetch_status(url)
        if as_json:
            console.out.print_json(json.dumps(answer))
        else:
            console.status_table(answer)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="As the answer's x-request-id names it.")],
    url: UrlFlag = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Why a recent request ran where it did: what was expected of each way, and what happened."""
    with plain_errors():
        answer = fetch_explanation(url, request_id)
        if as_json:
            console.out.print_json(json.dumps(answer))
        else:
            console.explanation(answer)


@app.command()
def role(
    worker: Annotated[str, typer.Argument(help="As `evenflow status` names it.")],
    role: Annotated[str, typer.Argument(help="mixed, prefill or decode.")],
    url: UrlFlag = DEFAULT_URL,
) -> None:
    """What a worker prefers to do from now on. Its streams go on; a drained one serves again."""
    with plain_errors():
        set_role(url, worker, role)
        console.done(f"{worker} is {role} now")


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="As `evenflow status` names it.")],
    url: UrlFlag = DEFAULT_URL,
) -> None:
    """A worker takes nothing new, and its streams go on elsewhere. `evenflow role` ends it."""
    with plain_errors():
        drain_worker(url, worker)
        console.done(f"{worker} takes nothing new")


@app.command()
def scale(
    pool: Annotated[str, typer.Argument(help="mixed, prefill or decode.")],
    workers: Annotated[int, typer.Argument(min=0, help="How many from now on.")],
    url: UrlFlag = DEFAULT_URL,
) -> None:
    """So many workers in a pool, within its range. The autoscaler goes on from there."""
    with plain_errors():
        scale_pool(url, pool, workers)
        console.done(f"{pool} is to have {workers} workers")


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    as_json: JsonFlag = False,
) -> None:
    """Make an API key: what its owner gets, and the entry for the server's key file."""
    from serving.auth import digest, new_key

    secret = new_key()
    if as_json:
        entry = {"name": name, "sha256": digest(secret)}
        console.out.print_json(json.dumps({"key": secret, "entry": entry}))
    else:
        console.new_key(name, secret, digest(secret))


@app.command()
def tune(
    model: ModelFlag = None,
    dtype: Annotated[str | None, Flag(help="auto, float32 or bfloat16.")] = None,
    device: Annotated[str | None, Flag(help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, Flag(help="Of the worker on a CPU. [all cores]")] = None,
    slo_itl: Annotated[str | None, Flag(help="Promised gap between tokens. [100ms]")] = None,
    streams: Annotated[int, Flag(min=1, max=64, help="Answers at the same time.")] = 8,
    prompt_tokens: Annotated[int, Flag(min=100, help="Length of the long prompt.")] = 4000,
    plot: Annotated[Path | None, Flag(help="Where to write a PNG.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure which step budget keeps the promised gap on this machine."""
    flags = {"model": model, "dtype": dtype, "device": device, "threads": threads}
    with plain_errors():
        config = load_config(None, {**flags, "slo.itl": slo_itl})
        _tune(config, streams, prompt_tokens, plot, as_json)


def _tune(
    config: Config, streams: int, prompt_tokens: int, plot: Path | None, as_json: bool
) -> None:
    from serving import console_tune
    from serving.deployments.tune import tuning_of

    with console.Progress() as progress:
        tuning = tuning_of(config, streams, prompt_tokens, progress.say)
    if plot is not None:
        try:
            from serving import tune_plot
        except ModuleNotFoundError as error:
            raise ServiceError(f"--plot needs {error.name}: pip install {error.name}") from None
        tune_plot.plot(tuning, plot)
    if as_json:
        console.out.print_json(json.dumps(asdict(tuning)))
    else:
        console_tune.show(tuning)


@app.command()
def doctor(
    host: Annotated[str, Flag(help="Where serve would listen.")] = "127.0.0.1",
    http_port: Annotated[int, Flag(help="Where serve would listen.")] = 8000,
    grpc_port: Annotated[int, Flag(help="Where serve would listen.")] = 9000,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine: each line says ok, or how to mend it."""
    from serving.doctor import examine

    findings = []
    for finding in examine(host, http_port, grpc_port):
        findings.append(asdict(finding))
        if not as_json:
            console.check_line(finding.name, finding.state, finding.text)
    if as_json:
        console.out.print_json(json.dumps(findings))
    if any(finding["state"] == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def plan(context: typer.Context) -> None:
    """Plan a cluster for a trace before buying it: mode, pools, budget, how many GPUs."""
    # The planner is built on everything here, so it is a program of its own.
    command = [sys.executable, "-P", "-m", "bench.plan", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
