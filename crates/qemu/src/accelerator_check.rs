//! Checks that a checkpoint can run under another accelerator: which one it ran under, and whether
//! the processors of the fresh QEMU have all features that the guest may use.

use crate::{Error, Qmp, Result, stream};
use keyframe_machine::{Accelerator, Processor};
use keyframe_qemu_cmdline::{Argument, CommandLineError, named_accelerator};
use serde_json::{Value, json};

/// Upper bound of the number of processors.
const PROCESSORS_MAX: usize = 4096;
/// Upper bound of the number of features of a processor.
const FEATURES_MAX: usize = 4096;

/// The accelerator that the checkpoint was taken under.
///
/// Error: [`CommandLineError::Accelerator`] if neither command line nor device state tell.
pub(crate) fn of_checkpoint(
    kept: &[Argument],
    device_state: &[u8],
    processor: Processor,
) -> Result<Accelerator> {
    let by_state = stream::written_by(device_state, processor)?;
    by_state.or_else(|| named_accelerator(kept)).ok_or_else(|| {
        refused(
            "neither its command line nor its device state tell which one it ran under",
            "restore it without --accel, on a host like the one it was taken on",
        )
    })
}

/// Fails if the accelerator `to` cannot execute the instructions of `processor` on this host.
pub(crate) fn require_accelerated(processor: Processor, to: Accelerator) -> Result<()> {
    if to == Accelerator::Kvm && !processor.has_kvm() {
        return Err(refused(
            format!("KVM of this host does not run guests of {processor}"),
            "restore it without --accel, or with --accel tcg",
        ));
    }
    Ok(())
}

/// Checks that the fresh QEMU runs under `to`, and that its processors have each feature that the
/// guest may use: those of the processor model without `missing_before`, which the guest did not
/// have (`None` if that is unknown). More features than the guest knows do no harm.
///
/// Error: [`CommandLineError::Accelerator`].
pub(crate) fn check_processors(
    qmp: &mut Qmp,
    to: Accelerator,
    missing_before: Option<&[String]>,
) -> Result<()> {
    let answer = qmp.execute("query-kvm", None)?;
    let enabled = answer.get("enabled").and_then(Value::as_bool);
    if enabled != Some(to == Accelerator::Kvm) {
        return Err(refused(
            format!("QEMU does not run under {to} although it was told to"),
            "look for an accelerator in the files that the command line reads (-readconfig)",
        ));
    }
    for lacks in lacking_of_each(qmp)? {
        check_lacking(&lacks, to, missing_before)?;
    }
    Ok(())
}

fn refused(reason: impl Into<String>, fix: impl Into<String>) -> Error {
    CommandLineError::Accelerator { reason: reason.into(), fix: fix.into() }.into()
}

fn check_lacking(
    lacks: &[String],
    to: Accelerator,
    missing_before: Option<&[String]>,
) -> Result<()> {
    let never_had = missing_before.unwrap_or_default();
    let names: Vec<&str> =
        lacks.iter().filter(|name| !never_had.contains(name)).map(String::as_str).collect();
    if names.is_empty() {
        return Ok(());
    }
    let without: Vec<String> = names.iter().map(|name| format!("-{name}")).collect();
    let reason =
        format!("under {to}, the processor lacks what the guest may use: {}", names.join(", "));
    let fix = format!(
        "restore it under the accelerator that it ran under; to move a VM, start it without these: \
         -cpu MODEL,{} (the default model is qemu64)",
        without.join(",")
    );
    Err(refused(reason, fix))
}

/// Features of the processor model that none of the VM's processors has, so that the guest cannot
/// use them.
pub(crate) fn lacking(qmp: &mut Qmp) -> Result<Vec<String>> {
    let all = lacking_of_each(qmp)?;
    let Some((first, others)) = all.split_first() else { return Ok(Vec::new()) };
    Ok(first.iter().filter(|name| others.iter().all(|o| o.contains(name))).cloned().collect())
}

/// For each processor, the features of its model that it lacks, by QEMU's own comparison.
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

    #[test]
    fn only_features_that_the_guest_never_had_may_be_missing() {
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
}
