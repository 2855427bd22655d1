"""The guest agent's protocol against a good agent, and against hostile ones."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import keyframe
from keyframe import agent as agent_module
from keyframe.command_line import agent_socket

from .fake_agent import Answer, FakeAgent, Good, line, synchronized


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


@pytest.fixture()
def good(path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(path, Good()) as agent:
        yield agent


def test_a_program_runs(path: Path, good: FakeAgent) -> None:
    with keyframe.GuestAgent(path) as agent:
        done = agent.exec(["sh", "-c", "cat; echo $KIND >&2; exit 3"], input="a", env={"KIND": "b"})
        assert (done.returncode, done.stdout, done.stderr) == (3, b"a", b"b\n")
        assert (done.text, done.is_truncated) == ("a", False)
        assert done.args == ["sh", "-c", "cat; echo $KIND >&2; exit 3"]
        with pytest.raises(subprocess.CalledProcessError):
            done.check_returncode()
        with pytest.raises(subprocess.CalledProcessError):
            agent.exec(["false"], check=True)
        data = os.urandom(1 << 20)
        assert agent.exec(["cat"], input=data).stdout == data
        assert agent.exec(["sh", "-c", "kill -9 $$"]).returncode == -9


def test_what_an_agent_refuses_leaves_the_connection(path: Path, good: FakeAgent) -> None:
    with keyframe.GuestAgent(path) as agent:
        with pytest.raises(keyframe.AgentRefused, match="Failed to execute") as caught:
            agent.exec(["/no/such/program"])
        assert caught.value.kind == "GenericError"
        with pytest.raises(keyframe.AgentRefused, match="guest-nothing"):
            agent.call("guest-nothing")
        assert agent.exec(["true"]).returncode == 0


def test_a_program_that_takes_too_long_is_killed(path: Path) -> None:
    answers = Good()
    with FakeAgent(path, answers), keyframe.GuestAgent(path) as agent:
        began = time.monotonic()
        with pytest.raises(
            keyframe.TimedOut, match=r"sleep did not end in the guest within 0\.3 s"
        ):
            agent.exec(["sleep", "60"], timeout=0.3)
        assert time.monotonic() - began < 5
        assert answers.programs == {}
        assert agent.exec(["true"]).returncode == 0


def test_threads_share_a_connection(path: Path, good: FakeAgent) -> None:
    with keyframe.GuestAgent(path) as agent, ThreadPoolExecutor(8) as threads:
        began = time.monotonic()
        done = [threads.submit(agent.exec, ["sh", "-c", f"sleep 0.5; echo {n}"]) for n in range(8)]
        assert [one.result().text for one in done] == [f"{n}\n" for n in range(8)]
        assert time.monotonic() - began < 3


def test_what_no_agent_is_asked(path: Path, good: FakeAgent) -> None:
    with keyframe.GuestAgent(path) as agent:
        good.commands.clear()
        for wrong in ([], ["x" * (1 << 20), "y"]):
            with pytest.raises(ValueError):
                agent.exec(wrong)
        with pytest.raises(TypeError, match="/bin/sh"):
            agent.exec("ls -l")
        with pytest.raises(ValueError, match="16 MiB"):
            agent.exec(["cat"], input=b"x" * ((16 << 20) + 1))
        assert good.commands == []


def test_there_is_no_agent(path: Path, tmp_path: Path) -> None:
    with pytest.raises(keyframe.NoAgent, match="No such file"):
        keyframe.GuestAgent(path)
    path.touch()
    with pytest.raises(keyframe.NoAgent, match="Connection refused"):
        keyframe.GuestAgent(path)
    with pytest.raises(keyframe.NoAgent, match="too long"):
        keyframe.GuestAgent(tmp_path / ("x" * 200))


def hostile(path: Path, answer: Answer, kind: type[Exception], match: str) -> None:
    """Asserts that `exec` raises `kind` soon, and closes the connection."""
    began = time.monotonic()
    with FakeAgent(path, answer):
        with pytest.raises(kind, match=match):
            with keyframe.GuestAgent(path, timeout=1.0) as agent:
                try:
                    agent.exec(["true"], timeout=1.0)
                finally:
                    assert not agent.is_open
    assert time.monotonic() - began < 10


def test_one_that_never_answers(path: Path) -> None:
    hostile(path, lambda _: b"", keyframe.TimedOut, r"did not answer within 1 s")


def test_one_that_never_answers_after_it_did(path: Path) -> None:
    # The program is to be killed, by a connection that it does not answer either.
    answers = iter([line({"pid": 7})])
    hostile(
        path,
        synchronized(lambda _: next(answers, b"")),
        keyframe.TimedOut,
        "true did not end in the guest within 1 s",
    )


def test_one_that_sends_a_wrong_id(path: Path) -> None:
    hostile(path, lambda _: b"\xff" + line(1), keyframe.TimedOut, "did not answer")
    path.unlink()
    hostile(path, lambda _: b"\xff[[[[\n\xff\n\xff7\n", keyframe.TimedOut, "did not answer")


def test_one_that_sends_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_STALE_BYTES_MAX", 1 << 20)
    hostile(path, lambda _: b"x" * (2 << 20), keyframe.BadAnswer, "more than 1048576 bytes")
    path.unlink()
    # In lines, of which none is too long.
    hostile(path, lambda _: b"xxxxxxx\n" * (1 << 18), keyframe.BadAnswer, "more than")


def test_one_that_answers_too_long(path: Path) -> None:
    long = b'{"return": {"pid": ' + b"1" * (2 << 20)
    hostile(path, synchronized(lambda _: long), keyframe.BadAnswer, "more than 1048576 bytes")


def test_one_that_sends_late_answers_for_ever(path: Path) -> None:
    late = (b"\xff" + line(1)) * (1 << 17)
    hostile(path, synchronized(lambda _: late), keyframe.BadAnswer, "more than")


def test_one_that_drips(path: Path) -> None:
    """Each byte is within a limit of its own, but not all of them are."""

    def drip(_: dict[str, Any]) -> bytes:
        time.sleep(0.4)
        return b" "

    answers = Good()

    def answer(command: dict[str, Any]) -> bytes | None:
        if command["execute"] == "guest-exec-status":
            return drip(command)
        return answers(command)

    hostile(path, answer, keyframe.TimedOut, "did not end")


@pytest.mark.parametrize("when", ["at once", "later"])
def test_one_that_closes(path: Path, when: str) -> None:
    answer: Answer = (lambda _: None) if when == "at once" else synchronized(lambda _: None)
    hostile(path, answer, keyframe.AgentLost, "ended")


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"no json\n", "no JSON"),
        (b"\x80\n", "no JSON"),
        (b"[" * 100_000 + b"\n", "no JSON"),
        (b"[]\n", "an object was expected"),
        (b"{}\n", "no `return`"),
        (b'{"error": 7}\n', "an object was expected"),
        (line(7), "an object was expected"),
        (line({}), "pid is None"),
        (line({"pid": "7"}), "pid is '7'"),
    ],
)
def test_one_that_answers_in_another_form(path: Path, answer: bytes, match: str) -> None:
    with FakeAgent(path, synchronized(lambda _: answer)):
        with keyframe.GuestAgent(path) as agent, pytest.raises(keyframe.BadAnswer, match=match):
            agent.exec(["true"])


@pytest.mark.parametrize(
    ("status", "match"),
    [
        ({"exited": True}, "neither"),
        ({"exited": True, "exitcode": "0"}, "neither"),
        ({"exited": True, "exitcode": 0, "out-data": 7}, "base64"),
        ({"exited": True, "exitcode": 0, "out-data": "ä"}, "base64"),
        ({"exited": True, "exitcode": 0, "err-data": "a"}, "base64"),
        (
            {
                "exited": True,
                "exitcode": 0,
                "out-data": base64.b64encode(b"x" * 17_000_000).decode(),
            },
            "16 MiB",
        ),
    ],
)
def test_a_status_of_another_form(path: Path, status: dict[str, Any], match: str) -> None:
    answers = iter([line({"pid": 7}), line(status)])
    with FakeAgent(path, synchronized(lambda _: next(answers))):
        with keyframe.GuestAgent(path) as agent, pytest.raises(keyframe.BadAnswer, match=match):
            agent.exec(["true"])


def test_an_output_that_the_agent_cut(path: Path) -> None:
    status = {"exited": True, "exitcode": 0, "out-data": "YQ==", "out-truncated": True}
    answers = iter([line({"pid": 7}), line({"exited": False}), line(status)])
    with FakeAgent(path, synchronized(lambda _: next(answers))):
        with keyframe.GuestAgent(path) as agent:
            done = agent.exec(["true"])
    assert (done.stdout, done.is_truncated) == (b"a", True)


def test_answers_to_a_former_client_are_skipped(path: Path) -> None:
    answers = Good()

    def answer(command: dict[str, Any]) -> bytes | None:
        right = answers(command)
        if command["execute"] == "guest-sync-delimited" and right is not None:
            return line({"pid": 7}) + b'{"return": {"exi' + b"\xff" + line(7) + right
        return right

    with FakeAgent(path, answer), keyframe.GuestAgent(path) as agent:
        assert agent.exec(["echo", "a"]).text == "a\n"


def test_an_agent_that_misses_the_first_question(path: Path) -> None:
    """Its late answers to the others are skipped."""
    answers = Good()
    questions: list[dict[str, Any]] = []

    def answer(command: dict[str, Any]) -> bytes | None:
        questions.append(command)
        if len(questions) == 1:
            return b""
        right = answers(command)
        late_ones = b"\xff" + line(questions[0]["arguments"]["id"])
        return (right or b"") + late_ones if len(questions) == 2 else right

    with FakeAgent(path, answer), keyframe.GuestAgent(path, timeout=10) as agent:
        assert agent.exec(["echo", "a"]).text == "a\n"


def test_clients_wait_for_each_other(path: Path, good: FakeAgent) -> None:
    """QEMU serves one at a time, and so does this agent."""
    first = keyframe.GuestAgent(path)
    threading.Timer(0.5, first.close).start()
    began = time.monotonic()
    with keyframe.GuestAgent(path, timeout=10) as second:
        assert second.exec(["true"]).returncode == 0
    assert time.monotonic() - began > 0.4


PORT = ["-device", "virtserialport,chardev=a,name=org.qemu.guest_agent.0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["-device"], None),
        (PORT, None),
        ([*PORT, "-chardev", "socket,id=a,path=/q,server=on"], "/q"),
        ([*PORT, "-chardev", "socket,id=a,path=q,server,nowait"], "/vm/q"),
        ([*PORT, "-chardev", "socket,id=a,path=/q,,r,server=on"], "/q,r"),
        ([*PORT, "-chardev", "socket,id=a,path=/q"], None),
        ([*PORT, "-chardev", "socket,id=a,path=/q,server=on,abstract=on"], None),
        ([*PORT, "-chardev", "socket,id=a,fd=7,server=on"], None),
        ([*PORT, "-chardev", "pty,id=a"], None),
        ([*PORT, "-chardev", "socket,id=b,path=/q,server=on"], None),
        (["-device", "virtserialport,chardev=a,name=x", *PORT[2:]], None),
        (
            [
                "-device",
                '{"driver":"virtserialport","chardev":"a","name":"org.qemu.guest_agent.0"}',
                "-chardev",
                "socket,id=a,path=/q,server=on",
            ],
            "/q",
        ),
        (["-device", "{", "-device", "[]", "-device", "{}"], None),
    ],
)
def test_the_socket_on_a_command_line(words: list[str], expected: str | None) -> None:
    found = agent_socket(["qemu-system-x86_64", *words], Path("/vm"))
    assert found == (None if expected is None else Path(expected))
