//! Opening, again and by several processes at once.

use super::{account, event, options, partition, store};
use crate::core::ShardCount;
use crate::store::{OpenError, Options, open};
use futures_util::future::{join_all, try_join_all};

/// Four nodes start on an empty database: all succeed, on one log, and it is the same log later.
pub async fn opening_twice_at_once_gives_one_log(url: &str) {
    let opening = (0..4).map(|_| {
        let options = options(url);
        tokio::spawn(async move {
            let store = open(&options).await.unwrap();
            store.create_type(&account()).await.unwrap();
            store
        })
    });
    let stores: Vec<_> = join_all(opening).await.into_iter().map(Result::unwrap).collect();
    for (event_id, store) in (1..).zip(&stores) {
        assert_eq!(store.identity(), stores[0].identity());
        store.append(&partition(7), &[event(event_id, "a", event_id, &format!("k{event_id}"))]).await.unwrap();
    }
    let again = store(url).await;
    assert_eq!(again.identity(), stores[0].identity());
    assert_eq!(again.head(&partition(7)).await.unwrap(), 4);
}

/// A node that disagrees on the number of shards does not start, and says why.
pub async fn the_number_of_shards_is_fixed(url: &str) {
    let first = open(&options(url)).await.unwrap();
    assert_eq!(first.shards(), options(url).shards);
    let other = Options { shards: ShardCount::new(32).unwrap(), ..options(url) };
    match open(&other).await.map(|_| ()) {
        Err(OpenError::Shards { configured: 32, stored: 64 }) => {}
        outcome => panic!("{outcome:?}"),
    }
    open(&options(url)).await.unwrap();
}

/// A store that works says so; many callers pass the barrier at once.
pub async fn stores_are_ready_and_pass_the_barrier(url: &str) {
    let store = store(url).await;
    store.ready().await.unwrap();
    assert!(store.engine().contains(|character: char| character.is_ascii_digit()), "{}", store.engine());
    try_join_all((0..50).map(|_| store.barrier())).await.unwrap();
    store.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
    store.barrier().await.unwrap();
}
