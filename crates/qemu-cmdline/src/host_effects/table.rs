//! The table of options that write to the host, listen on it, lock memory or choose.
//!
//! `docs/host-effects.md` shows it to users; a test compares the two.

/// The treatment of an option when its command line is run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// QEMU appends to the file. If a process has it open, another file is written.
    Append,
    /// Another file is written, beside the first one.
    FreshFile,
    /// If a process listens at the socket, another socket is made beside it.
    FreshSocket,
    /// Keyframe refuses it while another program uses it.
    RefuseInUse,
    /// Keyframe leaves it out, and notes that.
    LeftOut,
    /// A socket, a file or a network of the clone's own.
    Own,
    /// Without the ports of the host.
    WithoutPorts,
    /// The value that QEMU had chosen.
    Pinned,
    /// Keyframe leaves it as it is.
    Kept,
}

/// An option with an effect on the host, and its rules.
#[derive(Clone, Copy, Debug)]
pub struct EffectRow {
    /// The option, as QEMU spells it.
    pub option: &'static str,
    /// What QEMU does with the host if the option is repeated.
    pub effect: &'static str,
    /// The rule for a restored VM.
    pub restored: Rule,
    /// The rule for each clone of `keyframe branch`.
    pub cloned: Rule,
}

const fn row(
    option: &'static str,
    effect: &'static str,
    restored: Rule,
    cloned: Rule,
) -> EffectRow {
    EffectRow { option, effect, restored, cloned }
}

/// All options that write files, listen, lock or choose something of the host.
pub const TABLE: &[EffectRow] = &[
    row("-D FILE", "empties the file", Rule::FreshFile, Rule::Own),
    row("-qtest-log FILE", "empties the file", Rule::FreshFile, Rule::Own),
    row("-trace file=FILE", "empties the file", Rule::FreshFile, Rule::Own),
    row("-audiodev wav,path=FILE", "empties the file", Rule::FreshFile, Rule::Own),
    row("-object filter-dump,file=FILE", "empties the file", Rule::FreshFile, Rule::Own),
    row("-device ...,pcap=FILE", "empties the file", Rule::FreshFile, Rule::Own),
    row("-chardev file,path=FILE", "empties the file", Rule::Append, Rule::Own),
    row("-chardev ...,logfile=FILE", "empties the file", Rule::Append, Rule::Own),
    row("-serial, -parallel, -debugcon file:FILE", "empties the file", Rule::Append, Rule::Own),
    row("-monitor, -qmp file:FILE", "empties the file", Rule::Append, Rule::LeftOut),
    row("-chardev socket,path=P,server=on", "takes over the socket", Rule::FreshSocket, Rule::Own),
    row(
        "-serial, -parallel unix:P,server=on",
        "takes over the socket",
        Rule::FreshSocket,
        Rule::Own,
    ),
    row(
        "-monitor, -qmp unix:P,server=on",
        "takes over the socket",
        Rule::FreshSocket,
        Rule::LeftOut,
    ),
    row(
        "-netdev stream,server=on,addr.path=P",
        "takes over the socket",
        Rule::FreshSocket,
        Rule::Own,
    ),
    row("-vnc unix:P", "takes over the socket", Rule::FreshSocket, Rule::Own),
    row("-spice unix=on,addr=P", "takes over the socket", Rule::FreshSocket, Rule::Own),
    row("-chardev pipe,path=P", "takes part of the input", Rule::RefuseInUse, Rule::Own),
    row("-chardev socket,port=N,server=on", "listens at the port", Rule::RefuseInUse, Rule::Own),
    row("-serial, -parallel tcp:, telnet:", "listens at the port", Rule::RefuseInUse, Rule::Own),
    row("-monitor, -qmp tcp:, telnet:", "listens at the port", Rule::RefuseInUse, Rule::LeftOut),
    row("-gdb, -s", "listens at the port", Rule::RefuseInUse, Rule::LeftOut),
    row("-vnc HOST:N", "listens at the port", Rule::RefuseInUse, Rule::Own),
    row("-spice port=N", "listens at the port", Rule::RefuseInUse, Rule::Own),
    row(
        "-netdev, -nic user,hostfwd=...",
        "listens at the port",
        Rule::RefuseInUse,
        Rule::WithoutPorts,
    ),
    row("-netdev, -nic socket,listen=...", "listens at the port", Rule::RefuseInUse, Rule::Own),
    row("-netdev, -nic tap,ifname=X", "opens the interface", Rule::RefuseInUse, Rule::Own),
    row("-pidfile FILE", "overwrites the file", Rule::LeftOut, Rule::LeftOut),
    row("-daemonize", "leaves its parent", Rule::LeftOut, Rule::LeftOut),
    row("-overcommit mem-lock=on", "locks all RAM", Rule::Kept, Rule::LeftOut),
    row("-mem-path, -mem-prealloc", "allocates all RAM", Rule::LeftOut, Rule::LeftOut),
    row("several -accel, accel=A:B", "chooses an accelerator", Rule::Pinned, Rule::Pinned),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn words(rule: Rule) -> &'static str {
        match rule {
            Rule::Append => "appends; another file if it is open",
            Rule::FreshFile => "another file beside it",
            Rule::FreshSocket => "another socket if it is in use",
            Rule::RefuseInUse => "refused while it is in use",
            Rule::LeftOut => "left out",
            Rule::Own => "the clone's own",
            Rule::WithoutPorts => "without ports of the host",
            Rule::Pinned => "the one that was chosen",
            Rule::Kept => "kept; left out with `--lazy`",
        }
    }

    #[test]
    fn the_documented_table_is_this_one() {
        let mut text =
            String::from("| option | repeated, QEMU | restored VM | clone |\n|---|---|---|---|\n");
        for row in TABLE {
            let (restored, cloned) = (words(row.restored), words(row.cloned));
            text.extend(["| `", row.option, "` | ", row.effect, " | "]);
            text.extend([restored, " | ", cloned, " |\n"]);
        }
        let document = include_str!("../../../../docs/host-effects.md");
        assert!(document.contains(&text), "docs/host-effects.md must contain:\n{text}");
    }
}
