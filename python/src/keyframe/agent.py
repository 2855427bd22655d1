"""The QEMU guest agent of a VM: runs programs in the guest.

The agent's protocol is JSON, one line for each command and each answer, over a unix socket that
QEMU connects to a port of the guest. The guest is not trusted: each answer has a limit in bytes and
in time.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from .errors import AgentError, AgentLost, AgentRefused, BadAnswer, KeyframeError, NoAgent, TimedOut
from .processes import Deadline
from .program import expect_object

#: The sentinel of `guest-sync-delimited`, which no JSON text holds.
_SENTINEL = b"\xff"
_ANSWER_BYTES_MAX = 1 << 20
#: The agent keeps at most 16 MiB of each output, which it sends in base64.
_OUTPUT_BYTES_MAX = 16 << 20
_EXEC_ANSWER_BYTES_MAX = 2 * (_OUTPUT_BYTES_MAX * 4 // 3 + 4) + _ANSWER_BYTES_MAX
_INPUT_BYTES_MAX = 16 << 20
_WORDS_BYTES_MAX = 1 << 20
#: Answers to earlier clients, which may precede the one to a `guest-sync-delimited`.
_STALE_BYTES_MAX = 2 * _EXEC_ANSWER_BYTES_MAX
_RECEIVE_BYTES = 64 << 10
#: The agent's answer is waited for that long before it is asked anew; then twice as long.
_SYNC_SECONDS = 1.0
_POLL_SECONDS_MIN, _POLL_SECONDS_MAX = 0.01, 0.25
_KILL_SECONDS = 2.0


class Completed(subprocess.CompletedProcess[bytes]):
    """A program that ran in a guest, with what `subprocess.CompletedProcess` has.

    `args` is its command line and `returncode` its exit code; a negative one is the signal that
    ended it. `stdout` and `stderr` are its outputs. The agent keeps 16 MiB of each: if one was
    longer, `is_truncated` is true.

    >>> Completed(["cat", "/etc/hostname"], 0, b"web\\n", b"").text
    'web\\n'
    """

    stdout: bytes
    stderr: bytes

    def __init__(
        self,
        args: Sequence[str],
        returncode: int,
        stdout: bytes,
        stderr: bytes,
        *,
        is_truncated: bool = False,
    ) -> None:
        super().__init__(list(args), returncode, stdout, stderr)
        self.is_truncated = is_truncated

    @property
    def text(self) -> str:
        """The standard output as text; bytes that are no UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")


class GuestAgent:
    """A connection to a VM's guest agent, for use in a ``with``.

    `path` is the socket at which QEMU listens. The constructor waits at most `timeout` seconds
    until the agent answers. QEMU serves one connection at a time: others wait. Threads can share
    one: their commands follow each other, and programs that `exec` started run at the same time. If
    an answer is missing or wrong, the connection is closed.

    >>> with GuestAgent(agent_socket, timeout=10) as agent:
    ...     agent.exec(["echo", "hello"]).stdout
    b'hello\\n'

    Raises `NoAgent`, `AgentLost`, `TimedOut`, `BadAnswer`.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 10.0) -> None:
        self.path = os.fspath(path)
        self._received = bytearray()
        self.is_open = True
        self._lock = threading.Lock()
        deadline = Deadline(timeout, f"the guest agent at {self.path} did not answer")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(deadline)
            self._synchronize(deadline)
        except BaseException:
            self.close()
            raise

    def call(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout: float = 10.0,
    ) -> Any:
        """Sends a command of the agent's protocol and returns its answer, at most 1 MiB of JSON.

        Raises `AgentRefused`, `AgentLost`, `TimedOut`, `BadAnswer`.
        """
        deadline = Deadline(timeout, f"the guest agent did not answer {command}")
        return self._call(command, arguments or {}, deadline, _ANSWER_BYTES_MAX)

    def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        check: bool = False,
    ) -> Completed:
        """Runs a program in the guest until it ends.

        `argv` is the program, which the guest looks for in its `PATH`, and its arguments; no shell
        reads them. `input` is what the program reads, at most 16 MiB. `env` are all its environment
        variables, or `None` for those of the agent. A program that does not end within `timeout`
        seconds is killed, if the guest has `kill`.

        Raises `TimedOut`; `AgentRefused` if there is no such program, or if the agent is configured
        to run none; `subprocess.CalledProcessError` if `check` is true and the exit code is not 0.
        """
        arguments = _exec_arguments(argv, input, env)
        deadline = Deadline(timeout, f"{argv[0]} did not end in the guest")
        pid = _pid(self._call("guest-exec", arguments, deadline, _ANSWER_BYTES_MAX))
        try:
            completed = self._completed(argv, pid, deadline)
        except TimedOut:
            with suppress(KeyframeError):
                if self.is_open:
                    self._kill(pid)
                else:
                    with GuestAgent(self.path, timeout=_KILL_SECONDS) as other:
                        other._kill(pid)
            raise
        if check:
            completed.check_returncode()
        return completed

    def _completed(self, argv: Sequence[str], pid: int, deadline: Deadline) -> Completed:
        pause = _POLL_SECONDS_MIN
        while True:
            answer = self._call("guest-exec-status", {"pid": pid}, deadline, _EXEC_ANSWER_BYTES_MAX)
            status = expect_object(answer, "guest-exec-status")
            if status.get("exited") is True:
                return _completed(argv, status)
            deadline.sleep(pause)
            pause = min(1.5 * pause, _POLL_SECONDS_MAX)

    def _kill(self, pid: int) -> None:
        """Ends a program that took too long, if agent and guest do that at once."""
        deadline = Deadline(_KILL_SECONDS, "the guest agent did not answer")
        arguments = {"path": "kill", "arg": ["-KILL", str(pid)]}
        killer = _pid(self._call("guest-exec", arguments, deadline, _ANSWER_BYTES_MAX))
        # The agent forgets a program once it has told its end.
        self._completed(["kill"], killer, deadline)
        self._completed([""], pid, deadline)

    def close(self) -> None:
        """Closes the connection. The agent stays."""
        self.is_open = False
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self, deadline: Deadline) -> None:
        while True:
            try:
                self._socket.settimeout(deadline.left())
                self._socket.connect(self.path)
                return
            except BlockingIOError:
                # QEMU serves another client, and one more waits.
                deadline.sleep(_POLL_SECONDS_MAX)
            except TimeoutError:
                raise deadline.error() from None
            except OSError as error:
                raise NoAgent(
                    f"connect to the guest agent's socket {self.path}: {error}"
                ) from error

    def _synchronize(self, deadline: Deadline) -> None:
        """Skips answers to former clients. Waits until the agent has answered this one.

        An agent that has only just been started may have missed the first question.
        """
        seconds = _SYNC_SECONDS
        stale_bytes = _STALE_BYTES_MAX
        while True:
            number = secrets.randbelow(1 << 31) + 1
            question = {"execute": "guest-sync-delimited", "arguments": {"id": number}}
            # The sentinel ends what a former client has begun to send.
            self._send(_SENTINEL + _line(question), deadline)
            answered = Deadline(min(seconds, deadline.left()), "the guest agent did not answer")
            try:
                while True:
                    line = self._read_line(answered, stale_bytes)
                    stale_bytes -= len(line)
                    if _is_answer_to(line, number):
                        return
            except TimedOut:
                if deadline.is_over():
                    raise deadline.error() from None
            seconds *= 2

    def _call(
        self, command: str, arguments: Mapping[str, Any], deadline: Deadline, bytes_max: int
    ) -> Any:
        question = {"execute": command, "arguments": dict(arguments)}
        if not self._lock.acquire(timeout=deadline.left()):
            raise deadline.error()
        try:
            self._send(_line(question), deadline)
            while True:
                line = self._read_line(deadline, bytes_max)
                # Those with the sentinel are answers to earlier attempts to synchronize.
                if not line.startswith(_SENTINEL):
                    return _returned(command, line)
                bytes_max -= len(line)
        except AgentRefused:
            raise
        except BaseException:
            # The next answer might be the one to this question.
            self.close()
            raise
        finally:
            self._lock.release()

    def _send(self, data: bytes, deadline: Deadline) -> None:
        try:
            self._socket.settimeout(deadline.left())
            self._socket.sendall(data)
        except TimeoutError:
            raise deadline.error() from None
        except OSError as error:
            raise self._lost(error) from error

    def _read_line(self, deadline: Deadline, bytes_max: int) -> bytes:
        """The next line, at most `bytes_max` bytes. Raises `BadAnswer` if it is longer."""
        searched = 0
        while True:
            end = self._received.find(b"\n", searched)
            if end > bytes_max or (end < 0 and len(self._received) > bytes_max):
                raise BadAnswer(f"the guest agent sent an answer of more than {bytes_max} bytes")
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                return line
            searched = len(self._received)
            try:
                self._socket.settimeout(deadline.left())
                data = self._socket.recv(_RECEIVE_BYTES)
            except TimeoutError:
                raise deadline.error() from None
            except OSError as error:
                raise self._lost(error) from error
            if not data:
                raise self._lost(None)
            self._received += data

    def _lost(self, error: OSError | None) -> AgentError:
        cause = "it was closed" if error is None else str(error)
        return AgentLost(f"the connection to the guest agent at {self.path} ended: {cause}")


def _exec_arguments(
    argv: Sequence[str], input: bytes | str | None, env: Mapping[str, str] | None
) -> Mapping[str, Any]:
    if isinstance(argv, str):
        raise TypeError("argv is a list of words; for a shell: ['/bin/sh', '-c', 'the line']")
    words = [os.fspath(word) for word in argv]
    if not words:
        raise ValueError("argv is empty: its first word is the program")
    arguments: dict[str, Any] = {"path": words[0], "arg": words[1:], "capture-output": True}
    if env is not None:
        arguments["env"] = [f"{name}={value}" for name, value in env.items()]
    told = [*words, *arguments.get("env", [])]
    if sum(len(word.encode()) for word in told) > _WORDS_BYTES_MAX:
        raise ValueError("argv and env have more than 1 MiB; use input=")
    if input is not None:
        data = input.encode() if isinstance(input, str) else bytes(input)
        if len(data) > _INPUT_BYTES_MAX:
            raise ValueError("input has more than 16 MiB")
        arguments["input-data"] = base64.b64encode(data).decode()
    return arguments


def _line(question: Mapping[str, Any]) -> bytes:
    return json.dumps(question).encode() + b"\n"


def _is_answer_to(line: bytes, number: int) -> bool:
    """True for the answer to `guest-sync-delimited` with this id."""
    before, is_delimited, text = line.rpartition(_SENTINEL)
    if not is_delimited:
        return False
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and answer.get("return") == number


def _returned(command: str, line: bytes) -> Any:
    """The content of an answer. Raises `AgentRefused`, `BadAnswer`."""
    try:
        answer = expect_object(json.loads(line), command)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the guest agent's answer to {command} is no JSON: {error}") from error
    if "error" in answer:
        refusal = expect_object(answer["error"], command)
        raise AgentRefused(command, str(refusal.get("class")), str(refusal.get("desc")))
    if "return" not in answer:
        raise BadAnswer(f"the guest agent's answer to {command} has no `return`")
    return answer["return"]


def _pid(answer: Any) -> int:
    pid = expect_object(answer, "guest-exec").get("pid")
    if not isinstance(pid, int):
        raise BadAnswer(f"guest-exec: pid is {pid!r}")
    return pid


def _completed(argv: Sequence[str], status: Mapping[str, Any]) -> Completed:
    code, number = status.get("exitcode"), status.get("signal")
    if not isinstance(code, int):
        if not isinstance(number, int):
            raise BadAnswer("guest-exec-status: neither an exit code nor a signal")
        code = -number
    truncated = [status.get(f"{name}-truncated") is True for name in ("out", "err")]
    stdout, stderr = (_decoded(status.get(f"{name}-data", "")) for name in ("out", "err"))
    return Completed(argv, code, stdout, stderr, is_truncated=any(truncated))


def _decoded(data: Any) -> bytes:
    try:
        decoded = base64.b64decode(data, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise BadAnswer(f"guest-exec-status: an output is not in base64: {error}") from error
    if len(decoded) > _OUTPUT_BYTES_MAX:
        raise BadAnswer("guest-exec-status: an output of more than 16 MiB")
    return decoded
