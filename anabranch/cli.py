"""The command line. Logging and fault arming belong here and nowhere else, signal handlers in `signals`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from anabranch._version import VERSION
from anabranch.errors import AnabranchError, ServerError, UsageError
from anabranch.loops import leaf, run_async
from anabranch.queue.url import URL_VARIABLE, RunUrl
from anabranch.signals import call_on_signals, set_on_signals

app = typer.Typer(
    name="anabranch",
    help="Train one model on machines that come and go. Start here: `anabranch demo`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Url = Annotated[
    str,
    typer.Argument(
        envvar="ANABRANCH_URL",
        help="redis[s]://[user:password@]host[:port]/DB?run=NAME",
        metavar="URL",
        show_default=False,
    ),
]
SpecPath = Annotated[Path | None, typer.Option("--spec", help="run.toml; see --print-config for every setting")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, may be repeated", metavar="KEY=VALUE")
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="print the settings in force as TOML and exit")]
PagePort = Annotated[int, typer.Option(help="port of the status page; 0 picks a free one", min=0, max=65535)]
PageHost = Annotated[str, typer.Option(help="address of the status page")]
PageNames = Annotated[
    list[str] | None,
    typer.Option("--page-name", help="host name a proxy gives the page; may be repeated", metavar="HOST"),
]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Name = Annotated[str | None, typer.Option(help="this member's name in the run; made up by default")]
Label = Annotated[str, typer.Option(help="free text for the status page")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu")]
Threads = Annotated[int | None, typer.Option(help="torch threads; 1 by default on cpu", min=1)]
CheckpointPath = Annotated[
    str,
    typer.Argument(
        help="a checkpoint, or a run directory (its newest one): a folder or an fsspec URL", metavar="CHECKPOINT"
    ),
]
Init = Annotated[Path | None, typer.Option(help="safetensors file with the initial weights")]
Checkpoints = Annotated[
    str | None,
    typer.Option(help="where checkpoints are kept: a folder or an fsspec URL (s3://bucket/run); by default in --dir"),
]
TaskName = Annotated[
    str | None, typer.Option("--task", help="gpt, hf or package.module:Class instead of the run's task")
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="task hf: folder of the model and its tokenizer on this machine, instead of task.options.model"
    ),
]
Data = Annotated[Path | None, typer.Option(help="folder of text on this machine, instead of task.options.data")]
Lora = Annotated[
    bool | None,
    typer.Option("--lora/--no-lora", help="task hf: train adapters only, or everything; else task.options.lora"),
]
JournalMb = Annotated[int, typer.Option("--journal-mb", help="what the journal in --dir may grow to; 0: none", min=0)]
TapeMb = Annotated[
    int, typer.Option("--tape-mb", help="what tape.jsonl and its older parts may grow to; 0: without end", min=0)
]
DrainS = Annotated[float, typer.Option("--drain-s", help="seconds to finish what is in flight at SIGTERM", min=0.0)]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="until it is done, and say what came of it")]
Directory = Annotated[Path, typer.Option("--dir", help="run directory (mode 0700)")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anabranch {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="debug logging")] = False,
) -> None:
    from anabranch.faults import arm_from_environment

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s %(message)s" if verbose else "%(asctime)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
    )
    arm_from_environment()


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(help="minutes of training", min=0.02)] = 2.0,
    workers: Annotated[
        int, typer.Option(help="worker processes, of duty cycle 1, 1/2, 1/4 in turn", min=1, max=64)
    ] = 3,
    port: PagePort = 0,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="run directory; by default runs/demo-<time>")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="train on this folder instead of Python's own sources")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small language model with three unequal workers on this machine, for two minutes."""
    from anabranch.demo import Demo, DemoOptions
    from anabranch.terminal import DemoDisplay, print_summary

    logging.getLogger("anabranch").setLevel(logging.WARNING)
    where = directory or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    options = DemoOptions(where, minutes, workers, port, text)
    console = Console(stderr=as_json)
    ending = asyncio.Event()

    async def run() -> dict[str, Any]:
        with DemoDisplay(console) as show, set_on_signals(ending):
            return await Demo(options, show, ending).run()

    summary = run_async(run())
    print_summary(console, summary, str(where))
    if as_json:
        typer.echo(json.dumps(summary))
    if ending.is_set() or summary["ended"]:
        raise typer.Exit(130 if ending.is_set() else 1)


@app.command()
def up(
    directory: Directory = Path("runs/run"),
    name: Annotated[str, typer.Option(help="the run's name")] = "run",
    spec: SpecPath = None,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="address the server listens on; not loopback: joinable from elsewhere")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="port of the server; kept for the next time", min=1, max=65535)
    ] = None,
    page_host: PageHost = "127.0.0.1",
    page_port: PagePort = 0,
    page_names: PageNames = None,
    init: Init = None,
    checkpoints: Checkpoints = None,
    drain_s: DrainS = 10.0,
    journal_mb: JournalMb = 128,
    tape_mb: TapeMb = 256,
    print_config: PrintConfig = False,
) -> None:
    """Start (or continue) a run here: embedded server, synchronizer and status page."""
    settings = _settings(spec, overrides, name, print_config)
    from anabranch.orchestrator.web.app import PageOptions
    from anabranch.up import LeadOptions, bring_up, members_left

    options = LeadOptions(
        PageOptions(page_host, page_port, names=tuple(page_names or ())),
        init,
        checkpoints,
        drain_s,
        journal_mb,
        tape_mb,
    )
    fresh = spec is not None or bool(overrides)

    async def run() -> None:
        ending = asyncio.Event()
        with set_on_signals(ending):
            stored = (directory / "data").exists() and not fresh
            async with bring_up(directory, None if stored else settings, name, options, host, port) as running:
                typer.echo(f"run directory: {directory}\nstatus page:   {running.page}")
                typer.echo(f"join with:     {_join_line(directory)}")
                dead = asyncio.create_task(running.server.wait_dead(), name="cli: watch the server")
                try:
                    await _first_of(ending, running.synchronizer.stopped, running.task, dead)
                    if running.synchronizer.stopped.is_set():
                        await members_left(running.synchronizer)
                    if dead.done():
                        raise ServerError(
                            f"the embedded server ended by itself; its log says:\n{running.server.log_tail()}"
                        )
                finally:
                    dead.cancel()

    run_async(run())


@app.command(name="url")
def url_(directory: Directory = Path("runs/run")) -> None:
    """How others join the run in a run directory: the line that `up` printed when it began."""
    typer.echo(_join_line(directory))


@app.command()
def orchestrator(
    url: Url = "",
    spec: SpecPath = None,
    overrides: Overrides = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="folder for tape, journal and checkpoints")] = None,
    page_host: PageHost = "127.0.0.1",
    page_port: PagePort = 8765,
    page_names: PageNames = None,
    page: Annotated[bool, typer.Option(help="serve the status page")] = True,
    init: Init = None,
    checkpoints: Checkpoints = None,
    drain_s: DrainS = 10.0,
    journal_mb: JournalMb = 128,
    tape_mb: TapeMb = 256,
    print_config: PrintConfig = False,
) -> None:
    """Run the synchronizer (and its status page) against a Redis or Valkey server of yours."""
    run_url = RunUrl.parse(url) if url or not print_config else RunUrl("", "run")
    settings = _settings(spec, overrides, run_url.run, print_config)
    from anabranch.orchestrator.web.app import PageOptions
    from anabranch.up import LeadOptions, RunDirectory, lead

    page_options = PageOptions(page_host, page_port, names=tuple(page_names or ())) if page else None
    options = LeadOptions(page_options, init, checkpoints, drain_s, journal_mb, tape_mb)

    async def run() -> None:
        ending = asyncio.Event()
        folder = RunDirectory(directory) if directory is not None else None
        given = settings if spec is not None or overrides else None
        with set_on_signals(ending):
            async with lead(run_url, given, folder, options) as led:
                if led.page:
                    typer.echo(f"status page: {led.page}")
                await _first_of(ending, led.synchronizer.stopped, led.task)

    run_async(run())


@app.command()
def worker(
    url: Url,
    name: Name = None,
    label: Label = "",
    device: Device = "auto",
    threads: Threads = None,
    duty: Annotated[float, typer.Option(help="share of the time spent training")] = 1.0,
    task: Annotated[
        str | None, typer.Option(help="gpt, hf or package.module:Class instead of the run's task; or synthetic")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="items per step, or auto: what trains most tokens/s of what fits")
    ] = None,
    offload_base: Annotated[
        bool, typer.Option("--offload-base", help="keep the base on the host: saves 4 bytes per parameter")
    ] = False,
    own_data: Annotated[
        bool, typer.Option("--own-data", help="train on data of this machine, not on what the run hands out")
    ] = False,
    warm_start: Annotated[
        bool, typer.Option("--warm-start", help="begin with the optimizer state of another worker, if one has it")
    ] = False,
    model: Model = None,
    data: Data = None,
    lora: Lora = None,
    drain_s: DrainS = 10.0,
) -> None:
    """Join a run and train."""
    from anabranch.workers.run import MemberOptions, run_worker

    options = MemberOptions(
        name,
        label,
        device,
        threads,
        duty,
        task=task,
        batch=batch,
        offload_base=offload_base,
        own_data=own_data,
        warm_start=warm_start,
        task_options=_task_options(model, data, lora),
    )
    run_worker(RunUrl.parse(url), options, _ending(drain_s))


@app.command()
def evaluator(
    url: Url,
    name: Name = None,
    label: Label = "",
    device: Device = "auto",
    threads: Threads = None,
    every_s: Annotated[float, typer.Option(help="seconds between two measurements", min=0.1)] = 5.0,
    task: TaskName = None,
    model: Model = None,
    data: Data = None,
    lora: Lora = None,
    prompt: Annotated[
        str | None, typer.Option(help="log how the global model continues this text, at each measurement")
    ] = None,
    drain_s: DrainS = 10.0,
) -> None:
    """Join a run without contributing: measure held-out loss of the global model."""
    from anabranch.workers.run import MemberOptions, run_evaluator

    options = MemberOptions(
        name, label, device, threads, every_s=every_s, task=task, task_options=_task_options(model, data, lora),
        prompt=prompt,
    )  # fmt: skip
    run_evaluator(RunUrl.parse(url), options, _ending(drain_s))


@app.command()
def status(url: Url, as_json: AsJson = False) -> None:
    """What the run is doing, and why."""
    from anabranch.operate import status as read_status
    from anabranch.terminal import print_status

    shown = run_async(read_status(RunUrl.parse(url)))
    if as_json:
        typer.echo(json.dumps(shown))
    else:
        print_status(Console(), shown)


def _operator(action: str, help_: str) -> None:
    @app.command(action, help=help_)
    def send(url: Url, wait: Wait = True) -> None:
        _command(url, action, wait=wait)


_operator("stop", "End the run: a last checkpoint, then every member leaves.")
_operator("pause", "Open no more rounds until `resume`; workers train on.")
_operator("resume", "Open rounds again.")
_operator("checkpoint", "Write a checkpoint now, in the synchronizer's run directory.")


@app.command()
def restore(
    where: Annotated[
        str, typer.Argument(help="a checkpoint, a run directory (its newest one), or a URL", metavar="CHECKPOINT")
    ],
    url: Url,
    force: Annotated[bool, typer.Option(help="also where the server holds a model of this run")] = False,
) -> None:
    """Put a checkpoint in the place of what the server holds of a run; continue it with `orchestrator`."""
    from anabranch.orchestrator.restore import restore as put

    typer.echo(run_async(put(RunUrl.parse(url), where, force=force)))


@app.command(name="set")
def set_(
    words: Annotated[
        list[str],
        typer.Argument(help="for example rounds.quorum=2; URL: or ANABRANCH_URL", metavar="[URL] KEY=VALUE"),
    ],
    wait: Wait = True,
) -> None:
    """Change a setting while the run goes on (quorum, grace, inner_steps)."""
    from anabranch.settings import parse_value
    from anabranch.spec import check_mutable

    *where, setting = (
        words  # two arguments, the first of which may be in the environment, are more than a parser knows
    )
    if len(where) > 1:
        raise UsageError(f"{' '.join(map(repr, words))}: expected a URL and one section.key=value")
    url = where[0] if where else os.environ.get(URL_VARIABLE, "")
    key, separator, text = setting.partition("=")
    if not separator or "://" in key:
        raise UsageError(f"{setting!r}: expected section.key=value, for example rounds.quorum=2")
    value = parse_value(text)
    check_mutable(key, value)
    _command(url, "set", wait=wait, key=key, value=value)


@app.command()
def sample(
    where: CheckpointPath,
    prompt: Annotated[str, typer.Option(help="text to continue")] = "def ",
    length: Annotated[
        int, typer.Option("--bytes", help="how much to generate, in the task's units (gpt: bytes)", min=1, max=65536)
    ] = 400,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.8,
    seed: Annotated[int, typer.Option()] = 0,
    task: TaskName = None,
    model: Model = None,
    lora: Lora = None,
) -> None:
    """Let a checkpointed model write a few lines."""
    from anabranch.workers.sample import sample_checkpoint

    options = _task_options(model, None, lora)
    typer.echo(sample_checkpoint(where, prompt, length, temperature, seed, task=task, options=options))


@app.command()
def export(
    where: CheckpointPath,
    out: Annotated[Path, typer.Argument(help="the folder to write: new, or empty", metavar="OUT")],
    format_: Annotated[
        Literal["hf", "safetensors"],
        typer.Option("--format", help="hf: for transformers' from_pretrained; safetensors: tensors only"),
    ] = "hf",
    config: Annotated[
        Path | None,
        typer.Option(help="config.json, or a folder with one (its tokenizer comes along); else task.options.model"),
    ] = None,
    max_shard_mb: Annotated[int, typer.Option(help="largest file, in 10⁶ bytes", min=1)] = 5000,
) -> None:
    """Write a checkpoint's model as a folder that other programs load."""
    from anabranch.workers.export import ExportOptions, export_checkpoint

    written = export_checkpoint(where, out, ExportOptions(format_, config, max_shard_mb))
    typer.echo(f"{out}: {', '.join(written)}")


replay = typer.Typer(help="Go through again what a run recorded.", no_args_is_help=True)
app.add_typer(replay, name="replay")


@replay.command()
def decisions(
    run: Annotated[Path, typer.Argument(help="a run directory", metavar="RUN")], as_json: AsJson = False
) -> None:
    """Feed a run's journal to a fresh decision core and compare every decision and reason."""
    from anabranch.orchestrator.journal import segments
    from anabranch.simulate.replay import Replayed, replay_decisions

    def progress(path: Path, done: Replayed) -> None:
        if not as_json:
            typer.echo(f"{path.name}: {done.events:,} events, {done.decisions:,} decisions so far")

    done = replay_decisions(segments(run), progress)
    typer.echo(json.dumps(vars(done)) if as_json else done.summary)
    if done.difference is not None:
        raise typer.Exit(1)


def _settings(spec: Path | None, overrides: list[str] | None, run: str, print_config: bool) -> Any:
    from anabranch.settings import load_spec

    settings = load_spec(spec, overrides=[*(overrides or []), f'name="{run}"'])
    if print_config:
        typer.echo(settings.to_toml(), nl=False)
        raise typer.Exit
    return settings


def _task_options(model: Path | None, data: Path | None, lora: bool | None) -> dict[str, Any]:
    """What a machine says about the task goes before what the run says."""
    given = {"model": model, "data": data, "lora": lora}
    return {
        key: str(value) if isinstance(value, Path) else value for key, value in given.items() if value is not None
    }


def _join_line(directory: Path) -> str:
    from anabranch.up import stored_url

    return f"ANABRANCH_URL='{stored_url(directory)}' anabranch worker"


def _ending(drain_s: float) -> Any:
    """What the first signal asks a member for, from now on."""
    from anabranch.workers.run import Ending

    ending = Ending(drain_s)
    call_on_signals(ending.ask)
    return ending


def _command(url: str, action: str, *, wait: bool, **details: Any) -> None:
    from anabranch.operate import command, obeyed

    parsed = RunUrl.parse(url)
    if wait:
        run_async(obeyed(parsed, action, typer.echo, **details))
    else:
        run_async(command(parsed, action, **details))
        typer.echo(f"{action}: sent to run {parsed.run}")


async def _first_of(ending: asyncio.Event, stopped: asyncio.Event, *works: asyncio.Future[Any]) -> None:
    """Until a signal, a stop of the run, or the end of one of `works`."""
    waits = [asyncio.create_task(event.wait(), name="cli: wait") for event in (ending, stopped)]
    try:
        await asyncio.wait([*works, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def main() -> None:
    """The entry point: errors of ours and of the server are one line on standard error."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (Exception, BaseExceptionGroup) as error:
        from redis.exceptions import RedisError

        if not isinstance(leaf(error), AnabranchError | RedisError):
            raise
        _fail(str(leaf(error)))


def _fail(text: str) -> None:
    sys.stderr.write(f"anabranch: {text}\n")
    sys.stderr.flush()
    os._exit(2)  # a background thread must not hold up the exit


if __name__ == "__main__":
    main()
