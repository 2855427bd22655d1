"""The guest agent's socket, as QEMU's command line names it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: The name of the port that the guest agent opens in the guest.
AGENT_PORT = "org.qemu.guest_agent.0"
_COMMAND_LINE_BYTES_MAX = 4 << 20


def agent_socket(words: Sequence[str], directory: Path) -> Path | None:
    """The unix socket at which QEMU listens for the guest agent's client.

    `words` is QEMU's command line, `directory` QEMU's working directory. Returns `None` if the line
    gives the guest no port for an agent, or connects the port to something else.

    >>> line = ["qemu-system-x86_64", "-device", "virtio-serial",
    ...         "-chardev", "socket,id=qga,path=agent.sock,server=on,wait=off",
    ...         "-device", "virtserialport,chardev=qga,name=org.qemu.guest_agent.0"]
    >>> str(agent_socket(line, Path("/vm")))
    '/vm/agent.sock'
    """
    for device in _options(words, "device"):
        if device.get("driver") != "virtserialport" or device.get("name") != AGENT_PORT:
            continue
        for chardev in _options(words, "chardev"):
            if chardev.get("id") == device.get("chardev"):
                return _listening(chardev, directory)
    return None


def words_of(pid: int) -> tuple[list[str], Path] | None:
    """The command line and the working directory of a process; `None` if they cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(_COMMAND_LINE_BYTES_MAX)
        directory = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None
    return [word.decode(errors="surrogateescape") for word in text.split(b"\0")], directory


def _listening(chardev: Mapping[str, str], directory: Path) -> Path | None:
    listens = chardev.get("server", "off") in ("on", "yes", "true", "y")
    if chardev.get("backend") != "socket" or not listens or "path" not in chardev:
        return None
    if chardev.get("abstract", "off") not in ("off", "no", "false", "n"):
        return None
    return directory / chardev["path"]


def _options(words: Sequence[str], name: str) -> Iterator[Mapping[str, str]]:
    """The keys of each option `name`; the value without a key is named `driver` or `backend`."""
    for word, value in zip(words, words[1:]):
        if word in (f"-{name}", f"--{name}"):
            yield _keys(value, "driver" if name == "device" else "backend")


def _keys(value: str, first: str) -> Mapping[str, str]:
    """
    >>> _keys("socket,id=a,path=/a,,b,server", "backend")
    {'backend': 'socket', 'id': 'a', 'path': '/a,b', 'server': 'on'}
    >>> _keys('{"driver": "virtserialport", "nr": 1}', "driver")
    {'driver': 'virtserialport', 'nr': '1'}
    """
    if value.startswith("{"):
        try:
            known: Any = json.loads(value)
        except ValueError:
            return {}
        return {key: str(text) for key, text in known.items()} if isinstance(known, dict) else {}
    found: dict[str, str] = {}
    # Two commas are a comma of the value. No argument holds NUL.
    for number, part in enumerate(value.replace(",,", "\0").split(",")):
        key, is_pair, text = part.replace("\0", ",").partition("=")
        if is_pair:
            found[key] = text
        elif number == 0:
            found[first] = key
        else:
            # Of old: `server`, and `nowait`.
            found[key] = "on"
    return found
