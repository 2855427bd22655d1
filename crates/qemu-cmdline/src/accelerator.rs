//! Which accelerator a command line names, and how a kept line is made to name another.
//!
//! ```text
//!   kept:  -machine q35,accel=kvm,kernel-irqchip=split -enable-kvm -cpu Skylake-Server ...
//!   tcg:   -machine q35 ... -accel tcg
//! ```
//!
//! A restore under another accelerator needs three checks: of the line (here), of the device state
//! (crate `qemu-stream`), and of the processors of the fresh QEMU (the driver).
//!
//! Not handled: accelerators other than KVM and TCG.

use crate::options::{Argument, escape, keys, value_of};
use crate::{CommandLineError, Result};
use keyframe_machine::Accelerator;

/// Options that name or configure an accelerator.
const OPTIONS: &[&str] =
    &["accel", "enable-kvm", "no-kvm", "no-kvm-irqchip", "no-kvm-pit", "no-kvm-pit-reinjection"];
/// Keys of `-machine` that name or configure one.
const MACHINE_KEYS: &[&str] =
    &["accel", "kernel-irqchip", "kernel_irqchip", "kvm-shadow-mem", "kvm_shadow_mem"];
/// Returns the accelerator under which a QEMU with the command line `kept` runs; `None` if QEMU has
/// a choice.
pub fn named_accelerator(kept: &[Argument]) -> Option<Accelerator> {
    // The file can name one too.
    if kept.iter().any(|argument| argument.name() == "readconfig") {
        return None;
    }
    let named = named_accelerators(kept);
    match named.as_slice() {
        [one] if one == "kvm" => Some(Accelerator::Kvm),
        [one] if one == "tcg" => Some(Accelerator::Tcg),
        [] => Some(Accelerator::Tcg),
        _ => None,
    }
}

/// Returns true if the command line names several accelerators, of which QEMU takes the first that
/// works.
pub fn has_accelerator_choice(kept: &[Argument]) -> bool {
    named_accelerators(kept).len() > 1
}

/// Returns the command line `kept` without the accelerators other than `chosen`. The properties of
/// `chosen` stay.
pub fn with_accelerator(kept: &[Argument], chosen: Accelerator) -> Vec<Argument> {
    let chosen = chosen.to_string();
    let mut line = Vec::with_capacity(kept.len());
    for argument in kept {
        let other = match argument.name() {
            "enable-kvm" => chosen != "kvm",
            "no-kvm" => chosen != "tcg",
            "accel" => {
                let keys = keys(argument.value(), "accel");
                value_of(&keys, "accel").is_some_and(|named| named != chosen)
            }
            _ => false,
        };
        if other {
            continue;
        }
        if !matches!(argument.name(), "machine" | "M") || argument.value().starts_with('{') {
            line.push(argument.clone());
            continue;
        }
        let pinned: Vec<String> = keys(argument.value(), "type")
            .iter()
            .map(|(key, value)| match key.as_str() {
                "accel" if value.contains(':') => format!("accel={chosen}"),
                _ => format!("{key}={}", escape(value)),
            })
            .collect();
        let pinned = pinned.join(",");
        let is_same = !argument.value().contains(':');
        line.push(if is_same {
            argument.clone()
        } else {
            Argument::Option(argument.name().into(), pinned)
        });
    }
    line
}

/// The accelerators that a command line names, each once.
fn named_accelerators(kept: &[Argument]) -> Vec<String> {
    let mut named = Vec::new();
    for argument in kept {
        match argument.name() {
            "enable-kvm" => named.push("kvm".to_owned()),
            "no-kvm" => named.push("tcg".to_owned()),
            "accel" => {
                let list = value_of(&keys(argument.value(), "accel"), "accel").map(str::to_owned);
                named.extend(list.iter().flat_map(|l| l.split(':')).map(str::to_owned));
            }
            "machine" | "M" => {
                let list = value_of(&keys(argument.value(), "type"), "accel").map(str::to_owned);
                named.extend(list.iter().flat_map(|l| l.split(':')).map(str::to_owned));
            }
            _ => {}
        }
    }
    named.sort();
    named.dedup();
    named
}

/// Returns the command line `kept` without its accelerator. The caller adds `-accel` with another.
pub fn without_accelerator(kept: &[Argument]) -> Vec<Argument> {
    let machine = |argument: &Argument| {
        let all = keys(argument.value(), "type");
        let left: Vec<String> = all
            .iter()
            .filter(|(key, _)| !MACHINE_KEYS.contains(&key.as_str()))
            .map(|(key, value)| format!("{key}={}", escape(value)))
            .collect();
        match left.len() {
            n if n == all.len() => Some(argument.clone()),
            0 => None,
            _ => Some(Argument::Option(argument.name().into(), left.join(","))),
        }
    };
    let kept = kept.iter().filter(|a| !OPTIONS.contains(&a.name()));
    kept.filter_map(
        |a| if matches!(a.name(), "machine" | "M") { machine(a) } else { Some(a.clone()) },
    )
    .collect()
}

/// Returns the words that keep the defaults of `machine_type` as they were under the accelerator
/// `from`, when the command line `kept` runs under another one.
pub fn machine_defaults(kept: &[Argument], machine_type: &str, from: Accelerator) -> Vec<String> {
    let clock_given = kept
        .iter()
        .filter(|a| matches!(a.name(), "machine" | "M"))
        .any(|a| value_of(&keys(a.value(), "type"), "rtc").is_some_and(|rtc| rtc != "auto"));
    if machine_type != "microvm" || clock_given {
        return Vec::new();
    }
    // microvm has a real-time clock by default, but not under KVM.
    let clock = if from == Accelerator::Tcg { "rtc=on" } else { "rtc=off" };
    vec!["-machine".into(), clock.into()]
}

/// Refuses a command line whose machine would differ under the accelerator `to`.
///
/// Error: [`CommandLineError::Accelerator`].
pub fn check_accelerator_line(kept: &[Argument], to: Accelerator) -> Result<()> {
    for argument in kept {
        let refuse = |reason: String, fix: &str| {
            Err(CommandLineError::Accelerator {
                reason: format!("{}: {reason}", argument.display()),
                fix: fix.into(),
            })
        };
        match argument.name() {
            "icount" if to == Accelerator::Kvm => {
                return refuse("only TCG can count instructions".into(), "restore it under TCG");
            }
            "cpu" => {
                let words = keys(argument.value(), "model");
                let model = value_of(&words, "model").unwrap_or_default();
                if ["host", "max"].contains(&model) {
                    return refuse(
                        format!("the processor model {model} differs between accelerators"),
                        "restore it under the accelerator that it ran under; to move a VM, start it \
                         with a named processor model (qemu-system-x86_64 -cpu help lists them)",
                    );
                }
                let own = |(key, value): &&(String, String)| {
                    let key = key.trim_start_matches('+').replace('_', "-");
                    let of_kvm = key.starts_with("hv-")
                        || key.starts_with("kvm-")
                        || key.starts_with("xen-");
                    of_kvm && value != "off"
                };
                if let Some((key, _)) = words.iter().find(own).filter(|_| to == Accelerator::Tcg) {
                    return refuse(
                        format!("only KVM offers {key} to the guest"),
                        "restore it under KVM; to move a VM to TCG, start it without this feature",
                    );
                }
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;
    use proptest::prelude::*;

    fn line(text: &str) -> Vec<Argument> {
        parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_line_that_leaves_no_choice_names_its_accelerator() {
        use Accelerator::{Kvm, Tcg};
        for (text, named) in [
            ("-m 64", Some(Tcg)),
            ("-enable-kvm", Some(Kvm)),
            ("-accel kvm,dirty-ring-size=4096", Some(Kvm)),
            ("-M q35,accel=tcg", Some(Tcg)),
            ("-machine accel=kvm:tcg", None),
            ("-accel kvm -accel tcg", None),
            ("-accel xen", None),
            ("-readconfig x", None),
        ] {
            assert_eq!(named_accelerator(&line(text)), named, "{text}");
        }
    }

    #[test]
    fn only_the_accelerator_is_removed() {
        let kept = line(
            "-enable-kvm -M q35,accel=kvm,kernel-irqchip=split,nvdimm=on -machine accel=kvm -accel kvm -smp 2",
        );
        assert_eq!(without_accelerator(&kept), line("-M type=q35,nvdimm=on -smp 2"));
        let kept = line("-machine pc,usb=off -m 1G");
        assert_eq!(without_accelerator(&kept), kept);
    }

    #[test]
    fn microvm_keeps_its_clock_or_its_lack_of_one() {
        let words = |text: &str, from| machine_defaults(&line(text), "microvm", from).join(" ");
        assert_eq!(words("-M microvm", Accelerator::Kvm), "-machine rtc=off");
        assert_eq!(words("-M microvm,rtc=auto", Accelerator::Tcg), "-machine rtc=on");
        assert_eq!(words("-M microvm,rtc=on", Accelerator::Kvm), "");
        assert!(machine_defaults(&line("-M pc"), "pc-i440fx-7.2", Accelerator::Kvm).is_empty());
    }

    #[test]
    fn processors_that_only_one_accelerator_has_are_refused_with_a_fix() {
        use Accelerator::{Kvm, Tcg};
        for (text, to) in [
            ("-cpu host", Tcg),
            ("-cpu max,-avx", Kvm),
            ("-icount shift=1", Kvm),
            ("-cpu qemu64,hv_time", Tcg),
            ("-cpu qemu64,+kvm-pv-unhalt", Tcg),
            ("-cpu qemu64,kvm_pv_ipi=on", Tcg),
        ] {
            let error = check_accelerator_line(&line(text), to).unwrap_err();
            assert!(error.fix().is_some() && error.to_string().contains(text), "{error}");
        }
        for (text, to) in [
            ("-cpu qemu64,kvm=off,kvm-pv-eoi=off", Tcg),
            ("-cpu Skylake-Server,-hle", Tcg),
            ("-cpu qemu64,hv_time", Kvm),
            ("-icount shift=1", Tcg),
        ] {
            check_accelerator_line(&line(text), to).unwrap();
        }
    }

    proptest! {
        #[test]
        fn no_line_panics(words in prop::collection::vec("(-accel|-cpu|-M|-enable-kvm|[-+,=:a-z]{0,12})", 0..8)) {
            if let Ok(kept) = parse(&words) {
                let _ = (named_accelerator(&kept), check_accelerator_line(&kept, Accelerator::Tcg));
                let rest = without_accelerator(&kept);
                prop_assert_eq!(without_accelerator(&rest), rest);
            }
        }
    }
}
