//! One checkpoint in full, with its neighbours and the commands that use it.

use super::listed::ListedStore;
use keyframe_inspect::display_picture as screens;
use keyframe_inspect::show;
use keyframe_store::CheckpointId;
use keyframe_web::ApiError;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Returns all data of checkpoint `id` as a JSON object, with the commands that a user can give for
/// it. `running` holds the names of the VMs that run; `starts` is true if the server may start VMs.
/// Errors: there is no such checkpoint; the store cannot be read.
pub fn of(
    listed: &ListedStore,
    id: u64,
    running: &BTreeSet<String>,
    starts: bool,
) -> Result<Value, ApiError> {
    let failed = |e: keyframe_store::Error| listed.error(&e);
    let sealed = listed.store().sealed(CheckpointId(id)).map_err(failed)?;
    let mut all = serde_json::to_value(show::shown(&sealed))
        .map_err(|e| ApiError::Failed(format!("write JSON: {e}")))?;
    let listing = listed.listing()?;
    let vm = &sealed.meta.vm;
    let of_vm = || listing.checkpoints.iter().filter(|one| one.vm == *vm).map(|one| one.id);
    let place = quoted(&listed.place().display().to_string());
    let command = |verb: &str, rest: &str| format!("keyframe {verb} --store {place} {id}{rest}");
    let one = |name: &str, command: String, can_be_done: bool| json!({ "name": name, "command": command, "can_be_done": can_be_done });
    let mut commands = vec![
        one("restore", command("restore", ""), starts),
        one("branch", command("branch", " -n 1"), starts),
        one("pin", command("pin", ""), true),
        one("unpin", command("pin --remove", ""), true),
        one("tag", command("tag", " NAME"), false),
    ];
    if running.contains(vm) {
        commands.push(one(
            "rollback",
            format!("keyframe rollback {id} --name {}", quoted(vm)),
            true,
        ));
    }
    let members = sealed.meta.members_ram().unwrap_or_default();
    let shown = sealed
        .meta
        .members
        .iter()
        .zip(&members)
        .filter(|(_, (ram, _))| screens::has_display_memory(ram));
    let mut screens: Vec<Option<&str>> =
        shown.map(|(member, _)| Some(member.name.as_str())).collect();
    if sealed.meta.members.is_empty() && screens::has_display_memory(&sealed.meta.ram) {
        screens.push(None);
    }
    if let Some(object) = all.as_object_mut() {
        let parent = listing.get(id).and_then(|one| one.parent);
        object.insert("parent".into(), json!(parent));
        object.insert(
            "parent_is_there".into(),
            json!(parent.is_some_and(|parent| listing.get(parent).is_some())),
        );
        object.insert("previous".into(), json!(of_vm().rfind(|one| *one < id)));
        object.insert("next".into(), json!(of_vm().find(|one| *one > id)));
        object.insert("screens".into(), json!(screens));
        object.insert("commands".into(), json!(commands));
    }
    Ok(all)
}

/// Quotes `word` for a shell. Returns a word that needs no quotes unchanged.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=@,+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn a_word_stays_one_word_in_a_shell() {
        assert_eq!(quoted("/srv/store-1"), "/srv/store-1");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's; rm -rf $HOME"), r"'it'\''s; rm -rf $HOME'");
        assert_eq!(quoted(""), "''");
    }
}
