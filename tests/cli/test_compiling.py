"""The command line keeps what it compiles, and says so while somebody waits."""

import io
import pathlib

import jax
import pytest

from jaxkv._cli.compiling import NOTICE, announce, keep_compiled
from jaxkv._cli.main import main


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_says_what_it_waits_for():
    terminal, seen = Terminal(), []
    for item in announce(iter([1, 2]), terminal):
        seen.append((item, terminal.getvalue()))
    erased = NOTICE + "\b" * len(NOTICE) + "\x1b[K"
    assert seen == [(1, erased), (2, erased)] and terminal.getvalue() == erased
    file = io.StringIO()
    assert list(announce([1, 2], file)) == [1, 2] and not file.getvalue()


def test_the_notice_goes_when_nothing_comes():
    terminal = Terminal()
    with pytest.raises(ZeroDivisionError):
        list(announce((1 // 0 for _ in range(1)), terminal))
    assert terminal.getvalue().endswith("\x1b[K")


@pytest.fixture
def folder_of(monkeypatch):
    """Where programs are kept while JAX was told of one folder or none."""

    def find(given):
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        before = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", given)
        try:
            with keep_compiled():
                inside = jax.config.jax_compilation_cache_dir
            assert jax.config.jax_compilation_cache_dir == given
            return inside
        finally:
            jax.config.update("jax_compilation_cache_dir", before)

    return find


def test_programs_are_kept_in_the_user_s_cache_folder(folder_of):
    assert folder_of(None) == str(pathlib.Path("/somewhere/jaxkv/compiled"))
    assert folder_of("/my/own") == "/my/own"


def test_a_command_keeps_them(monkeypatch):
    """Whatever it raises: what it was told is as before."""
    seen = []

    def open_model(arguments, text=None):
        seen.append(jax.config.jax_compilation_cache_dir)
        raise ValueError("enough.")

    before = jax.config.jax_compilation_cache_dir
    for command in ("generate", "chat"):
        monkeypatch.setattr(f"jaxkv._cli.{command}.open_model", open_model)
        assert main([command, "--model", "nothing"]) == 2
    assert None not in seen and len(seen) == 2 and jax.config.jax_compilation_cache_dir == before
