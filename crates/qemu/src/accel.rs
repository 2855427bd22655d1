//! Which accelerator runs a VM, and how a kept command line is made to name another.
//!
//! ```text
//!   kept:  -machine q35,accel=kvm,kernel-irqchip=split -enable-kvm -cpu Skylake-Server ...
//!   tcg:   -machine q35 ... -accel tcg
//! ```
//!
//! A restore under another accelerator takes three checks, each where it can be made: the line
//! (here), the device state (`stream::convert`), and the processors of the fresh QEMU
//! ([`check_processors`]).
//!
//! Left out: accelerators other than KVM and TCG.

use crate::options::{Argument, escape, keys, value_of};
use crate::stream;
use crate::{Error, Qmp, Result};
use serde_json::{Value, json};
use std::fmt;

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor itself, through `/dev/kvm`.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// Options that name or configure an accelerator, whole.
const OPTIONS: &[&str] =
    &["accel", "enable-kvm", "no-kvm", "no-kvm-irqchip", "no-kvm-pit", "no-kvm-pit-reinjection"];
/// Keys of `-machine` that do.
const MACHINE_KEYS: &[&str] =
    &["accel", "kernel-irqchip", "kernel_irqchip", "kvm-shadow-mem", "kvm_shadow_mem"];
/// More processors than any machine has.
const PROCESSORS_MAX: usize = 4096;
/// More features than any processor has.
const FEATURES_MAX: usize = 4096;

/// The accelerator that the kept line must have run under; `None` where QEMU had a choice.
pub(crate) fn named_by(kept: &[Argument]) -> Option<Accelerator> {
    let mut named = Vec::new();
    for argument in kept {
        match argument.name() {
            "enable-kvm" => named.push("kvm".to_owned()),
            "no-kvm" => named.push("tcg".to_owned()),
            "accel" => {
                named.extend(value_of(&keys(argument.value(), "accel"), "accel").map(str::to_owned))
            }
            "machine" | "M" => {
                let list = value_of(&keys(argument.value(), "type"), "accel").map(str::to_owned);
                named.extend(list.iter().flat_map(|l| l.split(':')).map(str::to_owned));
            }
            // It can name one too.
            "readconfig" => return None,
            _ => {}
        }
    }
    named.sort();
    named.dedup();
    match named.as_slice() {
        [one] if one == "kvm" => Some(Accelerator::Kvm),
        [one] if one == "tcg" => Some(Accelerator::Tcg),
        [] => Some(Accelerator::Tcg),
        _ => None,
    }
}

/// The accelerator that the checkpoint was taken under. Error: neither line nor device state tell.
pub(crate) fn of_checkpoint(kept: &[Argument], device_state: &[u8]) -> Result<Accelerator> {
    let by_state = stream::written_by(device_state)?;
    by_state.or_else(|| named_by(kept)).ok_or_else(|| Error::Conversion {
        reason: "neither its command line nor its device state tell which one it ran under".into(),
        fix: "restore it without --accel, on a host like the one it was taken on".into(),
    })
}

/// The kept line without its accelerator. The caller adds `-accel` with the other.
pub(crate) fn without_accelerator(kept: &[Argument]) -> Vec<Argument> {
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

/// Words that keep the machine the same although its defaults depend on the accelerator.
pub(crate) fn machine_words(
    kept: &[Argument],
    machine_type: &str,
    from: Accelerator,
) -> Vec<String> {
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

/// Refuses a line whose VM can only be what it is under its own accelerator.
pub(crate) fn check_line(kept: &[Argument], to: Accelerator) -> Result<()> {
    for argument in kept {
        let refuse = |reason: String, fix: &str| {
            Err(Error::Conversion {
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
                        format!("the processor {model} is another one under each accelerator"),
                        "restore it under the accelerator that it ran under; a VM that is to move must be started with \
                         a named processor model (qemu-system-x86_64 -cpu help lists them)",
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
                        "restore it under KVM; a VM that is to move to TCG must be started without it",
                    );
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Compares the fresh QEMU with what it should be: its accelerator, and that it has every feature
/// that the guest was given.
///
/// That is its processor model without what the source lacked (`source_lacks`); all of the model,
/// where that is not known. A feature more than the guest knows of does it no harm.
pub(crate) fn check_processors(
    qmp: &mut Qmp,
    to: Accelerator,
    source_lacks: Option<&[String]>,
) -> Result<()> {
    let answer = qmp.execute("query-kvm", None)?;
    let enabled = answer.get("enabled").and_then(Value::as_bool);
    if enabled != Some(to == Accelerator::Kvm) {
        return Err(Error::Conversion {
            reason: format!("QEMU does not run under {to} although it was told to"),
            fix: "look for an accelerator in the files that the line reads (-readconfig)".into(),
        });
    }
    for lacks in lacking_of_each(qmp)? {
        check_lacking(&lacks, to, source_lacks)?;
    }
    Ok(())
}

fn check_lacking(lacks: &[String], to: Accelerator, source_lacks: Option<&[String]>) -> Result<()> {
    let never_had = source_lacks.unwrap_or_default();
    let names: Vec<&str> =
        lacks.iter().filter(|name| !never_had.contains(name)).map(String::as_str).collect();
    if names.is_empty() {
        return Ok(());
    }
    let without: Vec<String> = names.iter().map(|name| format!("-{name}")).collect();
    let reason =
        format!("under {to}, the processor lacks what the guest may use: {}", names.join(", "));
    let fix = format!(
        "restore it under the accelerator that it ran under; a VM that is to move must be started without these, with -cpu \
         MODEL,{} (the default model is qemu64)",
        without.join(",")
    );
    Err(Error::Conversion { reason, fix })
}

/// Features of their model that none of the VM's processors was given: what the guest surely does
/// not use.
pub(crate) fn lacking(qmp: &mut Qmp) -> Result<Vec<String>> {
    let all = lacking_of_each(qmp)?;
    let Some((first, others)) = all.split_first() else { return Ok(Vec::new()) };
    Ok(first.iter().filter(|name| others.iter().all(|o| o.contains(name))).cloned().collect())
}

/// Features of its model that each processor lacks, as QEMU itself compares them.
fn lacking_of_each(qmp: &mut Qmp) -> Result<Vec<Vec<String>>> {
    let processors = qmp.execute("query-cpus-fast", None)?;
    let Some(processors) = processors.as_array() else {
        return Err(qmp.unexpected("query-cpus-fast", &processors));
    };
    let mut all = Vec::new();
    for processor in processors.iter().take(PROCESSORS_MAX) {
        let path = processor.get("qom-path").and_then(Value::as_str).unwrap_or_default();
        let arguments = json!({ "path": path, "property": "unavailable-features" });
        let lacking = qmp.execute("qom-get", Some(arguments))?;
        let Some(names) = lacking.as_array() else {
            return Err(qmp.unexpected("qom-get", &lacking));
        };
        let names = names.iter().filter_map(Value::as_str).take(FEATURES_MAX);
        all.push(names.map(str::to_owned).collect());
    }
    Ok(all)
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
    fn the_line_tells_where_it_leaves_no_choice() {
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
            assert_eq!(named_by(&line(text)), named, "{text}");
        }
    }

    #[test]
    fn the_accelerator_goes_and_all_else_stays() {
        let kept = line(
            "-enable-kvm -M q35,accel=kvm,kernel-irqchip=split,nvdimm=on -machine accel=kvm -accel kvm -smp 2",
        );
        assert_eq!(without_accelerator(&kept), line("-M type=q35,nvdimm=on -smp 2"));
        let kept = line("-machine pc,usb=off -m 1G");
        assert_eq!(without_accelerator(&kept), kept);
    }

    #[test]
    fn microvm_keeps_its_clock_or_its_lack_of_one() {
        let words = |text: &str, from| machine_words(&line(text), "microvm", from).join(" ");
        assert_eq!(words("-M microvm", Accelerator::Kvm), "-machine rtc=off");
        assert_eq!(words("-M microvm,rtc=auto", Accelerator::Tcg), "-machine rtc=on");
        assert_eq!(words("-M microvm,rtc=on", Accelerator::Kvm), "");
        assert!(machine_words(&line("-M pc"), "pc-i440fx-7.2", Accelerator::Kvm).is_empty());
    }

    #[test]
    fn processors_that_only_one_accelerator_has_are_refused_with_a_way_out() {
        use Accelerator::{Kvm, Tcg};
        for (text, to) in [
            ("-cpu host", Tcg),
            ("-cpu max,-avx", Kvm),
            ("-icount shift=1", Kvm),
            ("-cpu qemu64,hv_time", Tcg),
            ("-cpu qemu64,+kvm-pv-unhalt", Tcg),
            ("-cpu qemu64,kvm_pv_ipi=on", Tcg),
        ] {
            let error = check_line(&line(text), to).unwrap_err();
            assert!(error.fix().is_some() && error.to_string().contains(text), "{error}");
        }
        for (text, to) in [
            ("-cpu qemu64,kvm=off,kvm-pv-eoi=off", Tcg),
            ("-cpu Skylake-Server,-hle", Tcg),
            ("-cpu qemu64,hv_time", Kvm),
            ("-icount shift=1", Tcg),
        ] {
            check_line(&line(text), to).unwrap();
        }
    }

    #[test]
    fn what_the_guest_never_had_may_be_lacking_and_nothing_else() {
        let names = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let check = |lacks: &str, had: Option<&str>| {
            check_lacking(&names(lacks), Accelerator::Kvm, had.map(names).as_deref())
        };
        check("hle rtm", Some("hle pcid rtm")).unwrap();
        check("", None).unwrap();
        for had in [None, Some(""), Some("hle pcid")] {
            let error = check("hle rtm", had).unwrap_err();
            assert!(error.fix().unwrap().contains("-rtm"), "{error}");
            assert_eq!(error.to_string().contains("hle"), had != Some("hle pcid"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_line_panics(words in prop::collection::vec("(-accel|-cpu|-M|-enable-kvm|[-+,=:a-z]{0,12})", 0..8)) {
            if let Ok(kept) = parse(&words) {
                let _ = (named_by(&kept), check_line(&kept, Accelerator::Tcg));
                let rest = without_accelerator(&kept);
                prop_assert_eq!(without_accelerator(&rest), rest);
            }
        }
    }
}
