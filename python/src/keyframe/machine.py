"""What `Vm` and `Clone` have in common: the process, the serial console and the guest agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from .agent import Completed, GuestAgent
from .command_line import agent_socket, words_of
from .errors import KeyframeError, NoAgent, TimedOut, VmEnded
from .processes import Deadline, Process

_CONSOLE_BYTES = 1 << 20
_CONSOLE_POLL_SECONDS = 0.05


class Console(Protocol):
    """A file with the output of a serial console."""

    @property
    def path(self) -> Path:
        """The file, which is removed when the VM ends."""

    def tail(self, bytes_max: int) -> str:
        """The last `bytes_max` bytes as text."""


class LogFile:
    """The log file of a clone's console, which the clone's command removes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self, bytes_max: int) -> str:
        """The last `bytes_max` bytes as text; empty if the file is gone."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - bytes_max))
                return file.read(bytes_max).decode(errors="replace")
        except OSError:
            return ""


class Machine:
    """A VM that runs on this host.

    `name` is its name, and `agent_path` the socket of its guest agent if the caller knows it better
    than QEMU's command line does.
    """

    def __init__(
        self, name: str, pid: int, *, console: Console | None, agent_path: Path | None = None
    ) -> None:
        self.name = name
        self._process = Process(pid)
        self._console = console
        self._agent_path = agent_path
        self._agent: GuestAgent | None = None
        self._agent_users = 0
        self._agent_lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The process id of QEMU or Firecracker."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True if the process of the VM has not ended."""
        return self._process.is_alive()

    @property
    def console_path(self) -> Path:
        """The file with the output of the serial console, which is removed when the VM ends.

        Raises `KeyframeError` if Keyframe does not have the console: see `console`.
        """
        return self._known_console().path

    def console(self, *, bytes_max: int = _CONSOLE_BYTES) -> str:
        """The end of the serial console's output, at most `bytes_max` bytes.

        Of a VM that this Python started, it is what QEMU writes to its standard output: QEMU's
        command line puts a console there by ``-nographic`` or ``-serial stdio``. Of a clone, it is
        the first serial console since the checkpoint. After the end of a VM that `run` or `restore`
        started, the last MiB is there; a clone's output is gone after the end of its `Clones`.

        Raises `KeyframeError` if the VM was started by another program: its console is where its
        command line puts it.
        """
        return self._known_console().tail(bytes_max)

    def wait_for_console(self, text: str, *, timeout: float = 60.0) -> str:
        """Waits until `text` is in the last MiB of the serial console's output, and returns that.

        Raises `TimedOut`, and `VmEnded` if the VM ends before.
        """
        deadline = Deadline(timeout, f"VM {self.name} did not print {text!r}")
        while True:
            # In this order, because a VM may end after it has printed the text.
            is_alive = self.is_alive
            output = self.console()
            if text in output:
                return output
            if not is_alive:
                raise VmEnded(f"VM {self.name} has ended, and did not print {text!r}")
            deadline.sleep(_CONSOLE_POLL_SECONDS)

    def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        check: bool = False,
    ) -> Completed:
        """Runs a program in the guest until it ends, by the QEMU guest agent.

        The guest needs a running ``qemu-ga``, and QEMU's command line a port for it::

            -device virtio-serial
            -chardev socket,id=qga,path=agent.sock,server=on,wait=off
            -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0

        `timeout` limits all together: the wait for an agent that is only just starting, and for the
        program. `GuestAgent.exec` describes the other arguments. Threads may run several programs
        at the same time.

        >>> vm.exec(["cat"], input="hello").text
        'hello'

        Raises `NoAgent`, `AgentRefused`, `AgentLost`, `TimedOut`, `VmEnded`, `BadAnswer`.
        """
        deadline = Deadline(timeout, f"{argv[0] if argv else 'it'} did not end in the guest")
        with self._shared_agent(deadline.left()) as agent:
            return agent.exec(argv, input=input, env=env, timeout=deadline.left(), check=check)

    def agent(self, *, timeout: float = 10.0) -> GuestAgent:
        """A connection of its own to the guest agent, for use in a ``with``. No other client can
        use the agent meanwhile, `exec` neither.

        Raises `NoAgent`, `AgentLost`, `TimedOut`, `VmEnded`.
        """
        try:
            return GuestAgent(self._agent_socket(), timeout=timeout)
        except KeyframeError as error:
            if not self.is_alive:
                raise self._ended() from error
            raise

    @contextmanager
    def _shared_agent(self, timeout: float) -> Iterator[GuestAgent]:
        """The connection that all threads share; it is closed after the last of them."""
        if not self._agent_lock.acquire(timeout=timeout):
            raise TimedOut(f"the guest agent of VM {self.name} did not answer another thread")
        try:
            if self._agent is None or not self._agent.is_open:
                self._agent = self.agent(timeout=timeout)
                self._agent_users = 0
            agent = self._agent
            self._agent_users += 1
        finally:
            self._agent_lock.release()
        try:
            yield agent
        except KeyframeError as error:
            if not self.is_alive:
                raise self._ended() from error
            raise
        finally:
            with self._agent_lock:
                if self._agent is agent:
                    self._agent_users -= 1
                    if self._agent_users == 0:
                        agent.close()
                        self._agent = None

    def _agent_socket(self) -> Path:
        if self._agent_path is not None:
            return self._agent_path
        known = words_of(self.pid)
        if known is None or not self.is_alive:
            raise self._ended()
        path = agent_socket(*known)
        if path is None:
            raise NoAgent(
                f"VM {self.name} has no socket for a guest agent on its command line\n"
                "  fix: add -device virtio-serial -chardev "
                "socket,id=qga,path=agent.sock,server=on,wait=off -device "
                "virtserialport,chardev=qga,name=org.qemu.guest_agent.0, and run qemu-ga in the "
                "guest; or name the agent's socket with agent="
            )
        return path

    def _known_console(self) -> Console:
        if self._console is None:
            raise KeyframeError(
                f"VM {self.name} was started by another program: its console is where its command "
                "line puts it"
            )
        return self._console

    def _ended(self) -> VmEnded:
        return VmEnded(f"VM {self.name} has ended")
