# etcd as Debian packages it.
FROM debian:bookworm-slim
RUN apt-get update && apt-get install --yes --no-install-recommends etcd-server && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["etcd"]
