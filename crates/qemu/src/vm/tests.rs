use super::*;

#[test]
fn a_path_that_no_socket_can_have_is_refused() {
    let long = PathBuf::from(format!("/{}", "x".repeat(120)));
    assert!(socket_config(&[("a", long)]).is_err());
    assert!(socket_config(&[("a", "/a\"b".into())]).is_err());
    assert!(socket_config(&[("a", "/a,b c".into())]).unwrap().contains("path = \"/a,b c\""));
}
