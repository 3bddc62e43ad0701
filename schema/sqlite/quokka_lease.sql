-- The office of the cluster's leader: one row, changed again and again by whoever holds it. Nothing that clients are promised depends on it.
CREATE TABLE IF NOT EXISTS quokka_lease (
  id     INTEGER NOT NULL, -- always 1: the table has one row
  holder TEXT    NULL,     -- the process that leads; NULL where the last one has laid the office down
  member TEXT    NOT NULL, -- its node as JSON: id and url
  term   INTEGER NOT NULL, -- grows with every change of leader
  beat   INTEGER NOT NULL, -- changed by the holder as long as it lives; whoever sees it stand still for too long may take the office
  CONSTRAINT primary_lease PRIMARY KEY (id),
  CONSTRAINT one_lease CHECK (id = 1)
) STRICT
