//! The live view of running VMs: how their engines' answers are drawn.

pub mod view;
