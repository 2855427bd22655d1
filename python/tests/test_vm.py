"""Real VMs, driven from Python: run, take, branch, restore, roll back, attach; and their errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import keyframe
from keyframe.processes import Deadline, Process

from . import machines
from .conftest import left, vms


def assert_ended(*machines_: keyframe.Vm | keyframe.Clone) -> None:
    assert [m for m in machines_ if m.is_alive] == []


def test_run_take_branch_roll_back(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh, name="web") as vm:
        assert vm.is_alive and vm.name == "web" and vm.store is fresh
        vm.wait_for_console("KF READY")
        base = vm.take(tag="base")
        assert (base.vm, base.tags, base.reason) == ("web", ("base",), "take")
        status = vm.status()
        assert (status.vm, status.state, status.interval_ns) == ("web", "running", None)
        assert (status.pid, status.failing, status.last_error) == (vm.pid, None, None)
        assert status.sealed == len(vm.checkpoints())

        clones = vm.branch(base, 2)
        assert [clone.name for clone in clones] == ["web-1", "web-2"]
        assert all(clone.is_alive for clone in clones) and vm.is_alive
        assert clones[0].directory is not None
        assert clones[0].consoles == {"serial": clones[0].directory / "serial.sock"}
        # Others are named apart.
        with vm.branch("base") as others:
            assert [clone.name for clone in others] == ["web-3"]
            assert others[0].is_alive
        assert_ended(*others)
        clones[0].stop()
        assert_ended(clones[0])
        assert clones[1].is_alive
        clones[1].wait_for_console("hash ")

        vm.wait_for_console("hash ")
        done = vm.rollback(base)
        assert (done.checkpoint, done.runs) == (base.id, True)
        assert done.before is not None and done.now is not None and done.pages > 0
        by_id = {one.id: one for one in vm.checkpoints()}
        assert by_id[done.now].parent == base.id
        assert base.diff(done.now).changed_pages == 0
        fast = vm.rollback("base", fast=True)
        assert (fast.before, fast.now) == (None, None)
        assert vm.status().state == "running"
        history = vm.checkpoints()
        assert len(vm.checkpoints(last=1)) == 1 and history[-1].id == vm.checkpoints(last=1)[0].id
        assert history._repr_html_().count("<tr>") == len(history) + 1
    assert_ended(vm, *clones)
    assert "KF READY" in vm.console()
    # The checkpoints stay.
    assert fresh.checkpoint("base") == base


def test_intervals(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh, interval=0.2, options=["--durability", "never"]) as vm:
        deadline = Deadline(60, "three checkpoints were not there")
        while vm.status().sealed < 3:
            deadline.sleep(0.1)
        assert vm.status().interval_ns == 200_000_000
    assert len(fresh.checkpoints(vm=vm.name)) >= 3


def test_it_returns_when_the_first_checkpoint_is_sealed(
    command: list[str], fresh: keyframe.Store
) -> None:
    with keyframe.run(command, fresh, interval="1h") as vm:
        first = fresh.checkpoint("latest")
        assert (first.vm, first.parent) == (vm.name, None)
        second = vm.take()
        assert second.parent == first.id
        assert second == fresh.checkpoint("latest")


def test_a_temporary_store(command: list[str]) -> None:
    with keyframe.run(" ".join(command)) as vm:
        assert vm.take().id == vm.checkpoints()[-1].id
        path = Path(vm.store.path)
        assert path.is_dir() and left() != []
    assert not path.exists()


def test_the_store_of_the_environment(
    command: list[str], fresh: keyframe.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYFRAME_STORE", fresh.path)
    with keyframe.run(command) as vm:
        vm.take()
    assert len(fresh.checkpoints()) >= 1


def test_restore(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh) as vm:
        vm.wait_for_console("KF READY")
        base = vm.take()
        with vm.restore(base) as restored:
            assert restored.is_alive and restored.pid != vm.pid
            restored.wait_for_console("hash ")
            assert restored.monitor is not None and restored.monitor.is_socket()
        assert_ended(restored)
        with vm.restore(base, name="trial") as restored:
            assert restored.name == "trial"
            with pytest.raises(keyframe.NameTaken, match="named trial"):
                vm.restore(base, name="trial")
        with vm.restore(base, lazy=True) as restored:
            assert restored.is_alive
        kept = vm.restore(base)
        assert kept.is_alive
    assert_ended(kept, vm)
    with keyframe.restore(fresh, base.id) as again:
        assert again.is_alive
        with keyframe.restore(fresh.path, base.id) as other:
            assert other.name != again.name
    assert_ended(again, other)


def test_clones_without_a_vm(store_path: Path) -> None:
    with keyframe.branch(store_path, "latest", 2, name="test", paused=True) as clones:
        assert [clone.name for clone in clones] == ["test-1", "test-2"]
        assert clones[0].directory is not None and clones[0].monitor is not None
        assert (clones[0].directory / "serial.sock").exists()
        assert [c.name for c in clones[:1]] == ["test-1"] and len(clones) == 2
    assert_ended(*clones)


def test_attach_to_a_clone(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh, name="web") as vm:
        base = vm.take()
        [clone] = vm.branch(base)
        with keyframe.attach(clone.pid, qmp=clone.monitor, store=fresh, name="web-1") as attached:
            assert attached.take().vm == "web-1"
            assert attached.pid == clone.pid
            with pytest.raises(keyframe.KeyframeError, match="started by another program"):
                attached.console()
        # It runs on.
        assert clone.is_alive
        with pytest.raises(keyframe.VmEnded, match="its checkpoints were stopped"):
            attached.take()
        # A clone ends together with an engine of its name.
        with keyframe.attach(clone.pid, qmp=clone.monitor, store=fresh, name="web-1") as attached:
            clone.stop()
            assert_ended(clone)
            attached.wait(20)


def test_connect(command: list[str], fresh: keyframe.Store) -> None:
    with pytest.raises(keyframe.KeyframeError, match="are: none"):
        keyframe.connect()
    with keyframe.run(command, fresh, name="web") as vm:
        with keyframe.connect() as same, keyframe.connect("web", store=fresh) as named:
            assert same.pid == named.pid == vm.pid and same.store.path == fresh.path
            base = same.take()
            clones = same.branch(base)
        assert_ended(*clones)
        assert vm.is_alive and vm.take().parent == base.id
        with pytest.raises(keyframe.NoVm, match="no VM named other") as caught:
            keyframe.connect("other")
        assert caught.value.fix is not None and "web" in caught.value.fix
        assert (caught.value.kind, caught.value.code) == ("no_vm", 1)


def test_unknown_checkpoints(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh) as vm:
        forgotten = vm.take()
        vm.take()
        machines.keyframe(
            vm.store._program.path, "forget", str(forgotten.id), "--store", fresh.path
        )
        for checkpoint in (99, "nothing", forgotten):
            for use in (vm.rollback, vm.branch, vm.restore):
                with pytest.raises(keyframe.UnknownCheckpoint):
                    use(checkpoint)
        assert vm.is_alive


def test_a_vm_that_is_gone(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh) as vm:
        base = vm.take()
        [clone, other] = vm.branch(base, 2)
        os.kill(clone.pid, signal.SIGKILL)
        clone.wait(20)
        with pytest.raises(keyframe.VmEnded, match="has ended"):
            clone.exec(["true"])
        clone.stop()
        assert other.is_alive
        os.kill(vm.pid, signal.SIGKILL)
        with pytest.raises(keyframe.CommandFailed, match="signal: 9"):
            vm.wait(20)
        for use in (vm.take, vm.status, lambda: vm.rollback(base), lambda: vm.exec(["true"])):
            with pytest.raises(keyframe.VmEnded, match="has ended"):
                use()
        # A checkpoint needs no VM.
        with vm.branch(base) as late:
            assert late[0].is_alive
        with pytest.raises(keyframe.CommandFailed, match="signal: 9"):
            vm.stop()
    assert_ended(vm, other)


def test_vms_that_end_by_themselves(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh) as vm:
        vm.wait_for_console("KF READY")
        [clone, other] = vm.branch(vm.take(), 2)
        assert clone.directory is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as console:
            console.connect(str(clone.directory / "serial.sock"))
            console.sendall(b"poweroff\r")
            # QEMU forgets what a client that leaves has sent.
            with pytest.raises(keyframe.VmEnded, match="did not print"):
                clone.wait_for_console("nothing prints this")
        clone.wait(20)
        assert other.is_alive
        with pytest.raises(keyframe.TimedOut, match=r"did not end within 0\.1 s"):
            other.wait(0.1)
    with keyframe.run(command, fresh, interval="200ms", options=["--count", "2"]) as vm:
        vm.wait(60)
    assert vm.messages() == ""


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_exception_ends_the_vm(
    command: list[str], fresh: keyframe.Store, kind: type[BaseException]
) -> None:
    with pytest.raises(kind), keyframe.run(command, fresh) as vm:
        clones = vm.branch(vm.take())
        raise kind("on purpose")
    assert_ended(vm, *clones)
    vm.stop()
    with pytest.raises(keyframe.VmEnded):
        vm.take()


def test_what_cannot_be_run(command: list[str], fresh: keyframe.Store, tmp_path: Path) -> None:
    with pytest.raises(keyframe.NoStore, match="keyframe init"):
        keyframe.run(command, tmp_path / "none")
    with pytest.raises(keyframe.CommandFailed, match="/no/such/qemu"):
        keyframe.run(["/no/such/qemu-system-x86_64"], fresh)
    with pytest.raises(keyframe.CommandFailed, match="nonsense"):
        keyframe.run([*command, "-nonsense"], fresh)
    with pytest.raises(keyframe.UsageError):
        keyframe.run(command, fresh, options=["--nonsense"])
    with pytest.raises(ValueError, match="empty"):
        keyframe.run("", fresh)
    with pytest.raises(ValueError, match="at least"):
        keyframe.run(command, fresh, interval=0)
    with pytest.raises(ValueError, match="one of"):
        keyframe.attach(1, store=fresh)
    with pytest.raises(ValueError, match="KEYFRAME_STORE"):
        keyframe.attach(1, qmp="/q")
    with pytest.raises(keyframe.CommandFailed):
        keyframe.attach(os.getpid(), qmp="/no/such/socket", store=fresh)
    with keyframe.run(command, fresh, name="web") as vm:
        with pytest.raises(keyframe.CommandFailed, match="web is running") as caught:
            keyframe.run(command, fresh, name="web")
        assert caught.value.fix is not None and "--name" in caught.value.fix
        with pytest.raises(keyframe.CommandFailed, match="nonsense"):
            vm.branch(vm.take(), extra=["-nonsense"])
        # The name is free for the next one.
        assert vm.branch("latest")[0].name == "web-1"


def test_a_start_that_takes_too_long(command: list[str], fresh: keyframe.Store) -> None:
    with pytest.raises(keyframe.TimedOut, match="the VM was not there within 0.001 s"):
        keyframe.run(command, fresh, timeout=0.001)


_USER = """
import sys, time, keyframe
vm = keyframe.run(sys.argv[2:], sys.argv[1])
clones = vm.branch(vm.take(), 2)
print(vm.pid, *(clone.pid for clone in clones), flush=True)
time.sleep(100)
"""


def test_a_killed_python_leaves_nothing(command: list[str], fresh: keyframe.Store) -> None:
    python = subprocess.Popen(
        [sys.executable, "-c", _USER, fresh.path, *command], stdout=subprocess.PIPE
    )
    try:
        assert python.stdout is not None
        pids = [int(word) for word in python.stdout.readline().split()]
        python.stdout.close()
        processes = [Process(pid) for pid in pids]
        assert len(pids) == 3 and all(process.is_alive() for process in processes)
        python.kill()
        python.wait()
        deadline = Deadline(60, "not all ended")
        while any(process.is_alive() for process in processes) or vms() or left():
            deadline.sleep(0.05)
    finally:
        python.kill()
        python.wait()
    # What was sealed is whole.
    assert len(fresh.checkpoints()) >= 1
    machines.keyframe(fresh._program.path, "check", "--store", fresh.path)


def test_a_killed_engine(command: list[str], fresh: keyframe.Store) -> None:
    """Its VM runs on without checkpoints, until the ``with`` ends."""
    with pytest.raises(keyframe.CommandFailed), keyframe.run(command, fresh) as vm:
        engine = vm.status().engine_pid
        os.kill(engine, signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(keyframe.CommandFailed, match="no VM named"):
            vm.take()
        assert vm.is_alive
    assert_ended(vm)


# The guest agent.


@pytest.fixture()
def agent_vm(agent_command: list[str], fresh: keyframe.Store) -> Iterator[keyframe.Vm]:
    with keyframe.run(agent_command, fresh, name="web") as vm:
        yield vm


def test_programs_in_guests(agent_vm: keyframe.Vm) -> None:
    vm = agent_vm
    assert vm.exec(["echo", "hello"], timeout=120).text == "hello\n"
    assert vm.exec(["sh", "-c", "cat >/tmp/a; exit 3"], input="as it was").returncode == 3
    base = vm.take()
    clones = vm.branch(base, 3)
    # Each has a file of its own, after one beginning.
    for number, clone in enumerate(clones):
        assert clone.exec(["cat", "/tmp/a"]).text == "as it was"
        clone.exec(["sh", "-c", f"echo {number} >/tmp/a"], check=True)
    assert [done.text for done in clones.exec(["cat", "/tmp/a"])] == ["0\n", "1\n", "2\n"]
    vm.exec(["rm", "/tmp/a"], check=True)
    assert vm.exec(["cat", "/tmp/a"]).returncode == 1
    with vm.restore(base) as restored:
        assert restored.exec(["cat", "/tmp/a"]).text == "as it was"
    with pytest.raises(keyframe.AgentRefused, match="nonsense"):
        vm.exec(["nonsense"])
    with pytest.raises(keyframe.TimedOut, match="sleep"):
        vm.exec(["sleep", "1000"], timeout=1)
    assert "sleep 1000" not in vm.exec(["ps"]).text
    with vm.agent() as agent:
        assert agent.call("guest-info")["version"]
    data = os.urandom(3 << 20)
    assert vm.exec(["cat"], input=data).stdout == data


def test_programs_after_a_rollback(agent_vm: keyframe.Vm) -> None:
    vm = agent_vm
    vm.exec(["sh", "-c", "cat >/tmp/a"], input="as it was", timeout=120)
    base = vm.take()
    vm.exec(["rm", "/tmp/a"], check=True)
    vm.rollback(base)
    assert vm.exec(["cat", "/tmp/a"]).text == "as it was"


def test_a_guest_that_switches_itself_off(agent_vm: keyframe.Vm) -> None:
    agent_vm.exec(["true"], timeout=120)
    with pytest.raises((keyframe.AgentLost, keyframe.VmEnded)):
        agent_vm.exec(["sh", "-c", "poweroff -f & sleep 100"], timeout=60)
    agent_vm.wait(60)
    with pytest.raises(keyframe.VmEnded, match="VM web has ended"):
        agent_vm.take()
    # Its last state is a checkpoint.
    assert agent_vm.store.checkpoint("latest").vm == "web"


def test_a_vm_without_an_agent(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh) as vm:
        with pytest.raises(keyframe.NoAgent, match="org.qemu.guest_agent.0"):
            vm.exec(["true"])
    with pytest.raises(keyframe.NoAgent, match="/no/such"):
        with keyframe.run(command, fresh, agent="/no/such") as vm:
            vm.exec(["true"])


def test_an_agent_that_is_not_running(
    command: list[str], fresh: keyframe.Store, tmp_path: Path
) -> None:
    port: list[Any] = ["-device", "virtio-serial-pci", "-chardev"]
    port += [f"socket,id=q,path={tmp_path / 'q.sock'},server=on,wait=off", "-device"]
    port += ["virtserialport,chardev=q,name=org.qemu.guest_agent.0"]
    with keyframe.run([*command, *port], fresh) as vm:
        with pytest.raises(keyframe.TimedOut, match=r"did not answer within"):
            vm.exec(["true"], timeout=1.5)
