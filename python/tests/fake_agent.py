"""A guest agent on a unix socket, in a thread: a good one that runs programs of this machine, or a
hostile one.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

#: Answers one command: the bytes to send, or `None` to close the connection.
Answer = Callable[[dict[str, Any]], bytes | None]


class FakeAgent:
    """Listens at `path` and answers each line by `answer`; a context manager."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self.commands: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # It ends `accept` and `recv` in the thread.
        for one in (self._listener, self._connection):
            if one is not None:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                return
            with self._connection as connection:
                try:
                    self._serve_one(connection)
                except OSError:
                    pass

    def _serve_one(self, connection: socket.socket) -> None:
        received = b""
        while data := connection.recv(65536):
            received += data
            *lines, received = received.split(b"\n")
            for line in lines:
                command = json.loads(line.rpartition(b"\xff")[2])
                self.commands.append(command["execute"])
                answer = self._answer(command)
                if answer is None:
                    return
                connection.sendall(answer)


def line(answer: Any) -> bytes:
    """An answer as the agent sends it."""
    return json.dumps({"return": answer}).encode() + b"\n"


def synchronized(then: Answer) -> Answer:
    """Answers `guest-sync-delimited` as it should, and other commands by `then`."""

    def answer(command: dict[str, Any]) -> bytes | None:
        if command["execute"] == "guest-sync-delimited":
            return b"\xff" + line(command["arguments"]["id"])
        return then(command)

    return answer


class Good:
    """Runs the programs that it is asked for, as qemu-ga does."""

    def __init__(self) -> None:
        self.programs: dict[int, subprocess.Popen[bytes]] = {}
        self.outputs: dict[int, tuple[bytes, bytes]] = {}

    def __call__(self, command: dict[str, Any]) -> bytes | None:
        return synchronized(self._answer)(command)

    def _answer(self, command: dict[str, Any]) -> bytes | None:
        arguments = command["arguments"]
        match command["execute"]:
            case "guest-exec":
                return self._exec(arguments)
            case "guest-exec-status":
                return line(self._status(arguments["pid"]))
            case other:
                return self._refused("CommandNotFound", f"The command {other} has not been found")

    def _exec(self, arguments: dict[str, Any]) -> bytes:
        environment = arguments.get("env")
        env = None if environment is None else dict(e.split("=", 1) for e in environment)
        try:
            program = subprocess.Popen(
                [arguments["path"], *arguments.get("arg", [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
            )
        except OSError as error:
            return self._refused("GenericError", f"Failed to execute child process: {error}")
        self.programs[program.pid] = program
        data = base64.b64decode(arguments.get("input-data", ""))

        def communicate() -> None:
            self.outputs[program.pid] = program.communicate(data)

        threading.Thread(target=communicate).start()
        return line({"pid": program.pid})

    def _status(self, pid: int) -> dict[str, Any]:
        if pid not in self.outputs:
            return {"exited": False}
        code = self.programs.pop(pid).returncode
        out, err = self.outputs.pop(pid)
        status: dict[str, Any] = {"exited": True}
        status.update({"exitcode": code} if code >= 0 else {"signal": -code})
        for name, data in (("out-data", out), ("err-data", err)):
            status.update({name: base64.b64encode(data).decode()} if data else {})
        return status

    @staticmethod
    def _refused(kind: str, text: str) -> bytes:
        return json.dumps({"error": {"class": kind, "desc": text}}).encode() + b"\n"
