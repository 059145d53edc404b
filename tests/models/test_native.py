"""Kernels are compiled once and kept; where that is not possible, work goes on without them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fednh.models import native

pytestmark = pytest.mark.skipif(native._compiler() is None, reason="no C compiler on this machine")


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Look for the library again, in a cache of its own."""
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def compiler(folder: Path, script: str) -> str:
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache/native").glob("*"))


def test_it_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.width() in (8, 16)
    (file,) = kept(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    native.library.cache_clear()
    monkeypatch.setattr(native, "_compiled", lambda *_: pytest.fail("it is there already"))
    assert native.library() is not None
    assert kept(tmp_path) == [file]


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Looks for the library a second time, and says how often it had to be compiled then."""

    def look() -> int:
        compiled, made = native._compiled, list[int]()
        monkeypatch.setattr(native, "_compiled", lambda *args: made.append(1) or compiled(*args))
        native.library.cache_clear()
        assert native.width() in (8, 16)
        monkeypatch.setattr(native, "_compiled", compiled)
        return len(made)

    return look


def test_what_others_can_change_is_not_loaded_but_replaced(tmp_path: Path, again: Callable[[], int]) -> None:
    assert native.library() is not None
    (file,) = kept(tmp_path)
    for thing in (file, file.parent):  # whole as it is: who can write it could have written anything, checksum and all
        for mode in (0o720, 0o702):
            thing.chmod(mode)
            assert again() == 1
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            assert again() == 0
    assert kept(tmp_path) == [file]


def test_what_belongs_to_somebody_else_is_neither_loaded_nor_replaced(
    tmp_path: Path, again: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.library() is not None
    (file,) = kept(tmp_path)
    before, somebody = file.read_bytes(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    assert again() == again() == 1, "compiled for this process alone"
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    ],
    ids=["empty", "half", "a bit turned"],
)
def test_a_damaged_library_is_replaced(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """In processes of their own: a library that is cut off would kill whoever loads it."""
    command = [sys.executable, "-c", "from fednh.models import native; print(native.width())"]
    width = native.width()
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stdout) == (0, f"{width}\n"), again.stderr
    assert file.read_bytes() == whole


def test_a_library_under_anothers_name_is_not_loaded(tmp_path: Path, again: Callable[[], int]) -> None:
    """Who can only rename this user's files puts an older library of theirs in the place of the newest."""
    assert native.library() is not None
    (file,) = kept(tmp_path)
    older = native._compiled(str(native._compiler()), ["-O0", "-shared", "-fPIC", "-DOLDER"])
    native._keep("0" * 64, older)
    (tmp_path / "cache/native" / native._file("0" * 64)).replace(file)
    assert again() == 1
    assert again() == 0


def test_a_swap_between_check_and_load_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is what was read: the file is another one by then, of another user as far as anybody knows."""
    assert native.library() is not None
    (file,) = kept(tmp_path)
    checked, loaded = native._check_mine, native._loaded

    def swap(content: bytes) -> object:
        file.unlink()
        file.write_bytes(b"somebody else's")
        return loaded(content)

    looked: list[int] = []
    monkeypatch.setattr(native, "_check_mine", lambda found: looked.append(found.st_ino) or checked(found))
    monkeypatch.setattr(native, "_loaded", swap)
    monkeypatch.setattr(native, "_compiled", lambda *_: pytest.fail("it is there already"))
    inode = file.stat().st_ino
    native.library.cache_clear()
    assert native.width() in (8, 16)
    assert looked == [file.parent.stat().st_ino, inode], "the folder, then the file, each as it was opened"


def test_without_files_in_memory_a_private_copy_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = lambda *_: os.open(os.devnull, os.O_WRONLY)  # noqa: E731
    monkeypatch.setattr(os, "memfd_create", nothing, raising=False)
    assert native.width() in (8, 16), "what is there cannot be loaded"
    native.library.cache_clear()
    monkeypatch.delattr(os, "memfd_create")
    assert native.width() in (8, 16), "as on other systems than Linux"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "file"))
    assert native.library() is not None


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "[ $1 = --version ] && echo mine; exit 3",
        '[ $1 = --version ] || { while [ "$1" != -o ]; do shift; done; echo broken > "$2"; }',
    ],
    ids=["it does not start", "it fails", "it writes no library"],
)
def test_with_a_bad_compiler_torch_does_the_work(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    assert native.library() is None
    assert native.width() == 0
    assert native.described() is None


def test_without_a_compiler_or_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNH_NATIVE", "0")
    assert native.library() is None
    native.library.cache_clear()
    monkeypatch.delenv("FEDNH_NATIVE")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert native.library() is None


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Neither loads half of what the other writes."""
    script = "from fednh.models import native; print(native.width())"
    ready = {**os.environ, "FEDNH_CACHE": str(tmp_path / "both")}
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=ready, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [int(each.communicate(timeout=120)[0]) for each in started] == [native.width()] * 2
    assert len(list((tmp_path / "both/native").iterdir())) == 1


@pytest.mark.soak
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_narrower_instructions_give_the_same(capability: str, tmp_path: Path) -> None:
    """The tests of kernels pass with what is compiled for an older processor, which a newer one can run, too."""
    script = (
        "import sys, torch, pytest\n"
        f"torch.backends.cpu.get_cpu_capability = lambda: {capability!r}\n"
        "from fednh.models import native\n"
        "assert native.width() == 8\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))\n"
    )
    tests = [str(Path(__file__).with_name(name)) for name in ("test_pooled_conv.py", "test_fast_conv.py")]
    done = subprocess.run([sys.executable, "-c", script, *tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_kernels_stay_inside_of_their_arrays(capability: str, tmp_path: Path) -> None:
    here, program = torch.backends.cpu.get_cpu_capability(), tmp_path / "bounds"
    if capability == "AVX512" and here != "AVX512":
        pytest.skip("this processor has no AVX-512")
    source = Path(__file__).with_name("kernel_bounds.c")
    command = ["cc", "-O1", "-g", "-fsanitize=address,undefined", *native.INSTRUCTIONS[capability]]
    subprocess.run([*command, "-o", str(program), str(source)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("clean\n", 0), done.stderr[:2000]
