//! The leader's lease: compare and set.

use super::store;
use crate::core::{Member, NodeId, Term};
use crate::store::Lease;
use futures_util::future::join_all;

fn lease(holder: &str, term: u64, beat: u64) -> Lease {
    let member = Member { id: NodeId::new("node-1").unwrap(), url: "http://ünï:1/'\\".into() };
    Lease { holder: (!holder.is_empty()).then(|| holder.to_owned()), member, term: Term(term), beat }
}

/// The lease is what was put there last by somebody who had seen the one before.
pub async fn a_lease_changes_hands_only_as_it_was_seen(url: &str) {
    let (one, other) = (store(url).await, store(url).await);
    assert_eq!(one.lease().await.unwrap(), None);
    let first = lease("a", 1, 0);
    assert!(!one.swap_lease(Some(&first), &lease("b", 2, 0)).await.unwrap(), "there is none to be seen");
    assert!(one.swap_lease(None, &first).await.unwrap());
    assert!(!other.swap_lease(None, &lease("b", 1, 0)).await.unwrap(), "somebody was faster");
    assert_eq!(other.lease().await.unwrap(), Some(first.clone()));
    let second = lease("a", 1, 1);
    assert!(one.swap_lease(Some(&first), &second).await.unwrap());
    assert!(!other.swap_lease(Some(&first), &lease("b", 2, 0)).await.unwrap(), "it has changed since");
    assert!(!other.swap_lease(Some(&lease("", 1, 1)), &lease("b", 2, 0)).await.unwrap(), "somebody holds it");
    let laid_down = lease("", 1, 1);
    assert!(one.swap_lease(Some(&second), &laid_down).await.unwrap());
    let third = lease("b", 2, 0);
    assert!(other.swap_lease(Some(&laid_down), &third).await.unwrap());
    assert_eq!(one.lease().await.unwrap(), Some(third));
}

/// Of many at once, one succeeds: when it is entered, and whenever it changes hands.
pub async fn of_many_who_take_a_lease_one_gets_it(url: &str) {
    let stores = join_all((0..4).map(|_| store(url))).await;
    let mut seen = None;
    for term in 1..=20 {
        let tries = stores.iter().enumerate().map(|(number, store)| {
            let (seen, next) = (seen.clone(), lease(&format!("{number}-{term}"), term, 0));
            async move { store.swap_lease(seen.as_ref(), &next).await.unwrap().then_some(next) }
        });
        let won: Vec<_> = join_all(tries).await.into_iter().flatten().collect();
        assert_eq!(won.len(), 1, "term {term}");
        seen = won.into_iter().next();
        assert_eq!(stores[0].lease().await.unwrap(), seen);
    }
}
