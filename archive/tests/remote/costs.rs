//! The number of requests that an archive sends.

use remanent_archive::remote::RemoteBucket;
use remanent_archive::testing::store::SimStore;

use crate::life::{commit, create};
use crate::server::Server;

/// Archiving one batch per second costs one create and one read per second. A second without a batch, or with only a
/// seal, costs no request.
#[test]
fn each_run_costs_one_put_and_one_get() {
    let server = Server::start();
    let bucket = RemoteBucket::open("s3://bucket", server.options()).unwrap();
    bucket.block_on(async {
        let (mut line, local) = create(&bucket).await.unwrap();
        server.take_received();
        for second in 1..=60 {
            commit(&mut line, &local, &[second]).await.unwrap();
        }
        let received = server.take_received();
        let count = |method| received.iter().filter(|request| request.method == method).count();
        assert_eq!((count("PUT"), count("GET"), received.len()), (60, 60, 120));

        for _ in 1..=60 {
            local.with(SimStore::seal);
            assert_eq!(line.append_run(&local).await.unwrap(), None);
        }
        assert_eq!(server.take_received().len(), 0, "an idle archive sends no request");
    });
}
