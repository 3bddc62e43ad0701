//! Appends of several partitions and entity types: all or none.

use super::{account, event, id, store};
use crate::core::{EntityType, Event, Partition, ShardId};
use crate::store::{AppendError, Store};
use futures_util::future::join_all;

fn transfer() -> EntityType {
    EntityType::new("transfer").unwrap()
}

fn of(entity_type: &EntityType, shard: u16) -> Partition {
    Partition { entity_type: entity_type.clone(), shard: ShardId(shard) }
}

async fn heads(store: &dyn Store) -> Vec<u64> {
    let mut heads = Vec::new();
    for partition in [of(&account(), 3), of(&account(), 9), of(&transfer(), 3)] {
        heads.push(store.head(&partition).await.unwrap());
    }
    heads
}

/// Whatever key is taken, wherever it stands, nothing of the append is there; and odd texts come through.
pub async fn appends_happen_together_or_not_at_all(url: &str) {
    let store = store(url).await;
    store.create_type(&transfer()).await.unwrap();
    let odd = "it's \\ \"🍣\"";
    let mut first = event(1, "t", 1, "k");
    first.request = crate::core::Json::canonical(serde_json::to_string(odd).unwrap().as_bytes()).unwrap();
    let all = [
        (of(&account(), 3), vec![event(1, "a", 1, "k"), event(2, "a", 2, "k2")]),
        (of(&account(), 9), vec![event(1, "b", 1, "k")]),
        (of(&transfer(), 3), vec![first.clone()]),
    ];
    store.append_all(&all).await.unwrap();
    assert_eq!(heads(&*store).await, [2, 1, 1]);
    let stored = store.newest(&transfer(), &[id("t")]).await.unwrap().remove(0).unwrap();
    assert_eq!(stored.event.request, first.request);
    let fine = |account_3: Event, account_9: Event, transfer_3: Event| {
        vec![(of(&account(), 3), vec![account_3]), (of(&account(), 9), vec![account_9]), (of(&transfer(), 3), vec![transfer_3])]
    };
    for (what, appends, position) in [
        ("the same again", all.to_vec(), true),
        ("a position of the first", fine(event(2, "a", 3, "x"), event(2, "b", 2, "x"), event(2, "t", 2, "x")), true),
        ("a position of the last", fine(event(3, "a", 3, "x"), event(2, "b", 2, "x"), event(1, "t", 2, "x")), true),
        ("a version of the second", fine(event(3, "a", 3, "x"), event(2, "b", 1, "x"), event(2, "t", 2, "x")), false),
        ("a command of the last", fine(event(3, "a", 3, "x"), event(2, "b", 2, "x"), event(2, "t", 2, "k")), false),
        ("within one table", vec![(of(&account(), 3), vec![event(3, "a", 3, "x")]), (of(&account(), 9), vec![event(2, "b", 2, "k")])], false),
    ] {
        match (store.append_all(&appends).await, position) {
            (Err(AppendError::PositionTaken), true) | (Err(AppendError::KeyTaken), false) => {}
            (outcome, _) => panic!("{what}: {outcome:?}"),
        }
        assert_eq!(heads(&*store).await, [2, 1, 1], "{what}");
    }
    let missing = EntityType::new("missing").unwrap();
    let half = vec![(of(&account(), 3), vec![event(3, "a", 3, "x")]), (of(&missing, 3), vec![event(1, "m", 1, "x")])];
    assert!(store.append_all(&half).await.is_err());
    assert_eq!(heads(&*store).await, [2, 1, 1]);
    store.append_all(&fine(event(3, "a", 3, "x"), event(2, "b", 2, "x"), event(2, "t", 2, "x"))).await.unwrap();
    assert_eq!(heads(&*store).await, [3, 2, 2]);
}

/// Writers race for the same partitions of two tables, together and alone: every append lands once and whole, and the ids have no holes.
pub async fn racing_writers_of_several_tables_leave_dense_logs(url: &str) {
    let store = store(url).await;
    store.create_type(&transfer()).await.unwrap();
    let writers = (0..6).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for round in 0..10 {
                let name = format!("w{writer}-{round}");
                loop {
                    let (one, other) = (of(&account(), 3), of(&transfer(), 3));
                    let (one_head, other_head) = (store.head(&one).await.unwrap(), store.head(&other).await.unwrap());
                    let mut appends = vec![(one, vec![event(one_head + 1, &name, 1, "k")])];
                    if writer % 3 != 0 {
                        appends.push((other, vec![event(other_head + 1, &name, 1, "k"), event(other_head + 2, &name, 2, "k2")]));
                    }
                    match store.append_all(&appends).await {
                        Ok(()) => break,
                        Err(AppendError::PositionTaken | AppendError::Interrupted(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        })
    });
    for writer in join_all(writers).await {
        writer.unwrap();
    }
    assert_eq!((store.head(&of(&account(), 3)).await.unwrap(), store.head(&of(&transfer(), 3)).await.unwrap()), (60, 80));
    assert_eq!((store.list(&account(), None, 100).await.unwrap().len(), store.list(&transfer(), None, 100).await.unwrap().len()), (60, 40));
}
