//! Tests a protected VM whose devices discard RAM, or are changed by a monitor of the user's own.

use keyframe_tests::protection::{Client, Hosts};
use keyframe_tests::{Process, TestEnv, wait_until};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Error, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

const WORK: &str = "ledger kf.dev=/dev/vda kf.ip=10.78.0.15";
/// The user's monitor: an abstract socket, which each host has its own of.
const MONITOR: &str = "keyframe-test-monitor";

/// A VM with a balloon and a monitor of its own on host a, which host b protects.
struct Pair {
    // The order in which they are dropped: processes before their hosts.
    client: Client,
    a: Process,
    b: Process,
    _witness: Process,
    hosts: Hosts,
    env: TestEnv,
}

impl Pair {
    fn new() -> Self {
        let env = TestEnv::without_store();
        let hosts = Hosts::new(&env);
        let witness = hosts.witness(&env);
        let b = hosts.standby(&env, "b", &[]);
        let chardev = format!("socket,id=own,path={MONITOR},abstract=on,server=on,wait=off");
        let boot = hosts.ledger_guest(WORK).with(&[
            "-device",
            "virtio-balloon-pci,id=balloon",
            "-device",
            "virtio-serial-pci",
            "-chardev",
            &chardev,
            "-mon",
            "chardev=own,mode=control",
        ]);
        let mut a = hosts.protect(&env, &[], &boot);
        let protected = a.wait_until(|a| a.errors().contains("loses nothing").then_some(()));
        assert!(protected.is_some(), "{}; the standby: {}", a.report(), b.report());
        hosts.wait_until_protected(&env, "a", &mut a);
        let client = hosts.client();
        Self { client, a, b, _witness: witness, hosts, env }
    }

    /// Gives commands to the user's monitor on `host`.
    fn command(&self, host: &str, commands: &[Value]) {
        let commands = commands.to_vec();
        let thread = self.hosts.host(host).inside(move || talk(&commands)).expect("a namespace");
        let answered = thread.join().expect("the monitor's thread").expect("enter the namespace");
        answered.expect("the user's monitor");
    }

    fn shown(&self) -> (String, String) {
        let status = self.hosts.status(&self.env, "a").expect("the primary's status");
        let text = |key: &str| status[key].as_str().expect("a text").to_owned();
        (text("state"), text("note"))
    }
}

fn talk(commands: &[Value]) -> std::io::Result<()> {
    let mut socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(MONITOR)?)?;
    let mut lines = BufReader::new(socket.try_clone()?).lines();
    for command in [&[json!({ "execute": "qmp_capabilities" })], commands].concat() {
        socket.write_all(format!("{command}\n").as_bytes())?;
        loop {
            let line = lines.next().ok_or_else(|| Error::other("it is closed"))??;
            let answer: Value = serde_json::from_str(&line)?;
            match answer.get("error") {
                Some(error) => return Err(Error::other(error.to_string())),
                None if answer.get("return").is_some() => break,
                None => {}
            }
        }
    }
    Ok(())
}

fn plug(arguments: &Value) -> Value {
    json!({ "execute": "device_add", "arguments": arguments })
}

#[test]
fn a_plugged_device_gets_to_the_standby_and_the_vm_goes_on_there() {
    let mut pair = Pair::new();
    pair.client.wait_for_entries(20, &mut pair.a);
    // The balloon takes RAM while the VM is protected.
    let inflate = json!({ "execute": "balloon", "arguments": { "value": 100 << 20 } });
    let rng =
        plug(&json!({ "driver": "virtio-rng-pci", "id": "r1", "max-bytes": 1024, "period": 1000 }));
    pair.command("a", &[inflate, rng]);
    let told = pair.a.wait_until(|a| {
        let errors = a.errors();
        let plugged = errors.find("device r1 (virtio-rng-pci) was plugged in")?;
        errors[plugged..].contains("protected: a failure of this host loses nothing").then_some(())
    });
    assert!(told.is_some(), "{}", pair.a.report());
    pair.hosts.wait_until_protected(&pair.env, "a", &mut pair.a);
    pair.client.wait_for_entries(20, &mut pair.a);
    pair.hosts.a.kill_all();
    pair.client.wait_for_entries(20, &mut pair.b);
    // The device is there, and can be unplugged.
    let get = |property: &str| {
        let arguments = json!({ "path": "/machine/peripheral/r1", "property": property });
        json!({ "execute": "qom-get", "arguments": arguments })
    };
    pair.command("b", &[get("max-bytes"), get("addr")]);
    assert_eq!(pair.hosts.running_qemus("b"), 1);
    pair.client.end();
}

#[test]
fn a_device_that_no_standby_can_follow_is_named_until_it_is_gone() {
    let mut pair = Pair::new();
    let port = json!({ "driver": "virtserialport", "id": "p1", "name": "org.example" });
    pair.command("a", &[plug(&port)]);
    wait_until("the device is named", || {
        let (state, note) = pair.shown();
        state == "unprotected" && note.contains("device p1 (virtserialport) was plugged in")
    });
    // The VM goes on, and its answers are not held.
    pair.client.wait_for_entries(20, &mut pair.a);
    let unplug = json!({ "execute": "device_del", "arguments": { "id": "p1" } });
    pair.command("a", &[unplug]);
    pair.hosts.wait_until_protected(&pair.env, "a", &mut pair.a);
    pair.client.wait_for_entries(20, &mut pair.a);
    pair.hosts.a.kill_all();
    pair.client.wait_for_entries(20, &mut pair.b);
    pair.client.end();
}
