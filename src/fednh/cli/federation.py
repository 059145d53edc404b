"""Commands of federations on several machines: the server, its sites, a run, and which apps a site lets run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednh import extras
from fednh.cli.app import app, console_for_people, print_sheets
from fednh.cli.options import OFFERED, Given, Quiet, Setting, Short, set_values, short, with_short_options
from fednh.cli.run import stop_on_signal
from fednh.errors import UserError
from fednh.text import one_line, plural, some

if TYPE_CHECKING:
    from fednh.config import Config
    from fednh.flower.layout import SiteFolder


federation_app = typer.Typer(help="Federations of sites that keep their data, on Flower.", no_args_is_help=True)
app.add_typer(federation_app, name="federation")

FederationArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]


@federation_app.command()
@with_short_options
def init(
    *,
    folder: FederationArgument,
    method: Annotated[Given, Short("method")],
    sites: Annotated[int | None, typer.Option(min=1, help="How many sites there are; default: 3.")] = None,
    names: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="The sites' names, one a site; default: site-1, site-2, ...")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="A source for each site, in turn; or one set by name, divided among them. Repeatable.",
            autocompletion=OFFERED["data"],
        ),
    ] = None,
    rounds: Annotated[
        Given, Short(short("rounds", help="Communication rounds; default: 10, or 1 if the method trains nothing."))
    ],
    settings: Setting = None,
) -> None:
    """Write a ready Flower app into a new folder; without data of its own it is digits, divided among the sites."""
    from fednh.flower.deploy import scaffold
    from fednh.flower.layout import FederationFolder

    given = method | rounds | set_values(settings)
    named = None if names is None else [name.strip() for name in names.split(",")]
    made = scaffold.write(folder, sites, data or [], given, named)
    if extras.installed("flower"):
        from fednh.flower.deploy import certificates as keys

        keys.make_orders(folder.absolute(), [site.name for site in made])
    typer.echo(f"{folder}: a federation of {plural(len(made), 'site')}, {some([site.name for site in made])}")
    if any(":" in source for source in data or []) and not {"data.classes", "data.columns"} & set(given):
        typer.echo(
            "sites tell only what is agreed: list classes with names in data.classes, text columns in data.columns"
        )
    typer.echo(f"try it on this machine: fednh federation up {folder} --local")
    typer.echo(f"on several machines: see {FederationFolder(folder).readme}")


@federation_app.command()
def certs(
    folder: FederationArgument,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME|IP", help="What sites call the server by. Repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the server's certificate is valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Issue the server's certificate again, from the same authority.")
    ] = False,
) -> None:
    """Make a certificate authority, the server's certificate and a key pair for every site: whatever is missing."""
    need_extra()
    from fednh.flower.deploy import certificates as keys
    from fednh.flower.deploy.scaffold import sites_of

    names = [site.name for site in sites_of(folder)]
    made = keys.renew(folder, host or [], days) if renew else keys.make(folder, names, host or [], days)
    for path in made:
        typer.echo(f"made {path}")
    if not made:
        typer.echo("all keys exist; nothing was made")
    typer.echo(f"the server's certificate is valid until {keys.expires(folder):%Y-%m-%d %H:%M} UTC")


@federation_app.command()
def up(
    folder: FederationArgument,
    local: Annotated[bool, typer.Option("--local", help="All of it on this machine, over the loopback.")] = False,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Sites come in through nginx, as on several machines; it must be installed.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a federation on this machine: start its server and sites, train, show progress, stop all of it.

    After an interruption the same command goes on where it was.
    """
    from fednh.flower.layout import FederationFolder

    if not local:
        raise UserError(
            f"fednh starts federations on this machine only: add --local, or see {FederationFolder(folder).readme}"
        )
    need_extra()
    from fednh.callbacks.screen import screen_for
    from fednh.flower.deploy import certificates as keys
    from fednh.flower.deploy import scaffold
    from fednh.flower.deploy.launch import LocalFederation, Stopped, check_platform
    from fednh.runs.run_folder import RunFolder

    check_platform()
    folder = folder.absolute()
    config, sites = scaffold.read(folder)
    run = Path(str(config.federation.folder))
    console = console_for_people(stderr=quiet)
    if RunFolder(run).ended(config):
        console.print(f"{run} is finished already", highlight=False, soft_wrap=True)
    else:
        with only_one(folder), stop_on_signal("fednh: stopping the federation", insist=False) as stop:
            keys.make(folder, [site.name for site in sites])
            keys.check_complete(folder, [site.name for site in sites])
            name = f"{config.method['name']} at {plural(len(sites), 'site')}"
            with screen_for(console, config.rounds, name, quiet) as screen:
                screen.on_note(
                    f"starting the server and {plural(len(sites), 'site')}; logs: {FederationFolder(folder).logs}"
                )
                try:
                    LocalFederation(folder, config, sites, screen, stop, proxy).run()
                except Stopped:
                    typer.echo(f"fednh: interrupted; go on with: fednh federation up {folder} --local", err=True)
                    raise typer.Exit(130) from None
    _tell(folder, run, config, sites, quiet)


@federation_app.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder, or its run folder.")],
) -> None:
    """Show the sites of a federation: names, keys, when each last answered, and in which rounds it took part."""
    need_extra()
    from fednh.flower.status import lines, read_status

    rows, remarks = read_status(folder.absolute())
    for line in lines(rows):
        typer.echo(line)
    for sentence in remarks:
        typer.echo(one_line(sentence))


@federation_app.command()
def audit(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Sites' folders, a federation's folder, a run folder, or single logs."),
    ],
    known: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE:HASH", help="A line that the log must have, as the other side has it. Repeatable."),
    ] = None,
) -> None:
    """Check audit logs and say what has left; exit code 1 if one was changed or is missing, and where.

    In a federation's folder, or if several are given, the logs of the server and of all its sites are compared.
    """
    from fednh.flower.audit_report import check, find, tell
    from fednh.io.chain import Head

    heads = [Head.read(text) for text in known or []]
    if None in heads:
        raise UserError("--known takes LINE:HASH, as `fednh federation audit` prints it, for example 12:0f3a...")
    checked = check(find(*folders), [head for head in heads if head])
    for row in checked:
        for sentence in tell(row):
            typer.echo(f"{sentence[: len(sentence) - len(sentence.lstrip())]}{one_line(sentence, 100_000)}")
    if broken := [f"{row.log.path}: {row.problem}" for row in checked if row.problem]:
        typer.echo(f"fednh: {one_line('; '.join(broken), 100_000)}", err=True)
        raise typer.Exit(1)


def _tell(folder: Path, run: Path, config: Config, sites: list[SiteFolder], quiet: bool) -> None:
    """Print the results and where they are."""
    if not quiet:
        from fednh.flower.layout import FederationFolder, StateFolder
        from fednh.report.load import load_runs
        from fednh.report.tables import comparison_sheet
        from fednh.runs.layout import RunLayout

        print_sheets(comparison_sheet(load_runs([run])))
        for shared in RunLayout(run).shared_models():
            if shared.global_model.exists():
                typer.echo(f"global model: {shared.global_model}")
        for site in sites:
            kept = StateFolder(FederationFolder(folder).trial_site(site.name).state)
            for model in kept.personal_models(config.federation.name):
                typer.echo(f"{site.name}: {model}")
        typer.echo("run folder:")
    typer.echo(str(run))


def only_one(folder: Path) -> AbstractContextManager[None]:
    """One of these commands at a time in a folder."""
    from fednh.flower.layout import FederationFolder
    from fednh.io.files import exclusive

    return exclusive(folder, FederationFolder(folder).home.lock_file, movable=False)


def need_extra() -> None:
    """Federations need packages that a simulation can do without."""
    extras.need("flower", "a federation")


# --- on several machines --------------------------------------------------------------------------------------------


SiteArgument = Annotated[
    Path, typer.Argument(metavar="SITE", help="The site's folder, with site.toml, key and ca.crt.")
]


@federation_app.command()
def serve(
    folder: FederationArgument,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On the loopback; the proxy calls it.")] = 8000,
) -> None:
    """Be the server, until stopped: Flower's SuperLink on the loopback, and what runs its ServerApps.

    Sites come in through a proxy (proxy/nginx.conf); nobody else can reach the server.
    """
    need_extra()
    from fednh.flower.deploy import launch, scaffold

    folder = folder.absolute()
    launch.check_platform()
    config, _ = scaffold.read(folder)
    with only_one(folder), stop_on_signal("fednh: stopping the server", insist=False) as stop:
        launch.serve(folder, config, stop, typer.echo, port)


@federation_app.command()
def join(
    folder: SiteArgument,
    server: Annotated[str, typer.Option(metavar="NAME:PORT", help="Where the server's proxy listens.")],
) -> None:
    """Be a site, until stopped: Flower's SuperNode, and what runs the apps that this site has approved."""
    need_extra()
    from fednh.flower.deploy import launch

    launch.check_platform()
    folder = folder.absolute()
    launch.check_site(folder, server)
    with only_one(folder), stop_on_signal("fednh: stopping the site", insist=False) as stop:
        launch.join(folder, server, stop, typer.echo)


@federation_app.command()
def run(folder: FederationArgument) -> None:
    """Train: start the federation's app at the server on this machine, and wait for its end.

    After an interruption the same command goes on where it was.
    """
    need_extra()
    from fednh.flower.deploy import launch, scaffold

    folder = folder.absolute()
    config, _ = scaffold.read(folder)
    path = Path(str(config.federation.folder))
    with stop_on_signal("fednh: no longer watching; the run goes on at the server", insist=False) as stop:
        launch.train(folder, config, stop)
        if stop.is_set():
            raise typer.Exit(130)
    typer.echo(f"run folder: {path}")


@federation_app.command()
def approve(
    folder: Annotated[Path, typer.Argument(metavar="DIR|SITE", help="The federation's folder, or a site's.")],
    app_hash: Annotated[str | None, typer.Argument(metavar="[HASH]", help="Of the app that the site lets run.")] = None,
) -> None:
    """Say which app sites let run; without HASH in a site's folder, show which.

    In the federation's folder: the app as it is there now, in all folders of sites that are to be handed over.
    """
    need_extra()
    from fednh.flower.deploy import scaffold
    from fednh.flower.layout import SiteFolder

    here = SiteFolder(folder.absolute())
    folder, listed = here.path, here.approved_file
    if here.node_config.exists():
        if app_hash is not None:
            new = scaffold.approve(listed, app_hash.lower())
            typer.echo(f"{app_hash.lower()} {'may run here from now on' if new else 'was approved before'}")
        for each in scaffold.approved(listed) if app_hash is None else []:
            typer.echo(each)
        return
    if app_hash is not None:
        raise UserError(
            f"{folder} is not a site's folder: it has no {here.node_config.name}; an app is approved by a site"
        )
    sites = scaffold.sites_of(folder)
    app = scaffold.app_of(folder)
    typer.echo(f"app {app.hash}")
    typer.echo(f"holds {', '.join(app.files)}")
    for site in sites:
        scaffold.approve(site.approved_file, app.hash)
    typer.echo(f"approved in the folders of {plural(len(sites), 'site')}; at a site that has its folder already:")
    typer.echo(f"fednh federation approve SITE {app.hash}")
