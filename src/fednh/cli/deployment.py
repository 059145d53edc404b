"""Commands of federations on several machines: the server, its sites, a run, and which apps a site lets run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednh.cli.federation import FederationArgument, federation_app, need_extra, only_one
from fednh.cli.run import stop_on_signal
from fednh.errors import UserError

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
    from fednh.flower.deploy import scaffold, stand

    folder = folder.absolute()
    config, _ = scaffold.read(folder)
    with only_one(folder), stop_on_signal("fednh: stopping the server", insist=False) as stop:
        stand.serve(folder, config, stop, typer.echo, port)


@federation_app.command()
def join(
    folder: SiteArgument,
    server: Annotated[str, typer.Option(metavar="NAME:PORT", help="Where the server's proxy listens.")],
) -> None:
    """Be a site, until stopped: Flower's SuperNode, and what runs the apps that this site has approved."""
    need_extra()
    from fednh.flower.deploy import stand

    folder = folder.absolute()
    stand.check_site(folder, server)
    with only_one(folder), stop_on_signal("fednh: stopping the site", insist=False) as stop:
        stand.join(folder, server, stop, typer.echo)


@federation_app.command()
def run(folder: FederationArgument) -> None:
    """Train: start the federation's app at the server on this machine, and wait for its end.

    After an interruption the same command goes on where it was.
    """
    need_extra()
    from fednh.flower.deploy import scaffold, stand

    folder = folder.absolute()
    config, _ = scaffold.read(folder)
    path = Path(str(config.federation.folder))
    with stop_on_signal("fednh: no longer watching; the run goes on at the server", insist=False) as stop:
        stand.train(folder, config, stop)
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
    from fednh.flower.deploy import approval, scaffold
    from fednh.flower.layout import SiteFolder

    here = SiteFolder(folder.absolute())
    folder, listed = here.path, here.approved_file
    if here.node_config.exists():
        if app_hash is not None:
            new = approval.approve(listed, app_hash.lower())
            typer.echo(f"{app_hash.lower()} {'may run here from now on' if new else 'was approved before'}")
        for each in approval.approved(listed) if app_hash is None else []:
            typer.echo(each)
        return
    if app_hash is not None:
        raise UserError(
            f"{folder} is not a site's folder: it has no {here.node_config.name}; an app is approved by a site"
        )
    sites = scaffold.sites_of(folder)
    app = approval.app_of(folder)
    typer.echo(f"app {app.hash}")
    typer.echo(f"holds {', '.join(app.files)}")
    for site in sites:
        approval.approve(site.approved_file, app.hash)
    typer.echo(f"approved in the folders of {len(sites)} sites; at a site that has its folder already:")
    typer.echo(f"fednh federation approve SITE {app.hash}")
