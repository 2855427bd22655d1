//! The live view of running VMs: what engines answer, kept over time (`history`), and drawn
//! (`view`).

pub mod history;
pub mod view;
