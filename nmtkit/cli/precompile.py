"""`nmtkit precompile`: compiles the search of the engine numba beforehand."""

import click

from nmtkit.cli import imports
from nmtkit.cli.command import Command, echo
from nmtkit.jobs import progress


@click.command(cls=Command)
def command() -> None:
    """Compile the CPU search for this processor, and print the folder with the machine code.

    \b
    nmtkit precompile
    XDG_CACHE_HOME=/opt/cache nmtkit precompile

    Without this command, the first translation on a machine compiles the search in the background. So the command is
    useful for container images and for benchmarks. The code is kept in $NMTKIT_CACHE, or in the folder nmtkit of
    $XDG_CACHE_HOME or of ~/.cache. The code works only on the same kind of processor. Needs nmtkit[numba].
    """
    from nmtkit.config.files import user_cache
    from nmtkit.jobs import machine_code

    if not machine_code.installed():
        raise ImportError("nmtkit precompile needs the package numba: pip install 'nmtkit[numba]'")
    if not machine_code.is_ready() and not machine_code.is_kept():
        raise OSError(f"the folder {user_cache()} cannot be written; set NMTKIT_CACHE to another folder")
    with imports():
        from nmtkit.translation.engines.numba_engine import compile_search
    progress.begin("Compiling")
    machine_code.ensure(compile_search)
    echo(str(machine_code.folder()))
