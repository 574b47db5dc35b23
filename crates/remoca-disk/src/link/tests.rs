//! The list of servers, and what a successor finds of it.

use super::*;

fn endpoints(names: &[&str]) -> Vec<Endpoint> {
    names.iter().map(|name| format!("unix:/nowhere/{name}").parse().unwrap()).collect()
}

/// Returns names and numbers of the servers, in their order.
fn servers(link: &ServerLink) -> Vec<(String, u32)> {
    let name = |server: &KnownServer| server.endpoint.to_string().replace("unix:/nowhere/", "");
    link.servers().iter().map(|server| (name(server), server.number.0)).collect()
}

fn listed(servers: &[(&str, u32)]) -> Vec<(String, u32)> {
    servers.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect()
}

#[test]
fn a_new_list_has_the_operators_order_and_those_that_stay_keep_number_and_token() {
    let mut link = ServerLink::start(&endpoints(&["a", "b", "c"])).unwrap();
    assert_eq!(servers(&link), listed(&[("a", 0), ("b", 1), ("c", 2)]));
    let before = link.roster();
    link.replace(&endpoints(&["c", "new", "a"])).unwrap();
    assert_eq!(servers(&link), listed(&[("c", 2), ("new", 3), ("a", 0)]));
    let after = link.roster();
    assert_eq!((&after[0].token, &after[2].token), (&before[2].token, &before[0].token));
    assert!(before.iter().all(|server| server.token != after[1].token));
    link.replace(&endpoints(&["b"])).unwrap();
    assert_eq!(servers(&link), listed(&[("b", 4)]), "a number is never used again: an old pool could be taken for its");
    assert_ne!(link.roster()[0].token, before[1].token);
    assert!(link.replace(&endpoints(&["a", "a"])).is_err());
    assert_eq!(servers(&link), listed(&[("b", 4)]));
}
