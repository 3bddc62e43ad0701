-- What the whole database agrees on: one row, written when quokka first uses it.
CREATE TABLE IF NOT EXISTS quokka_meta (
  id             INTEGER NOT NULL, -- always 1: the table has one row
  schema_version INTEGER NOT NULL, -- version of the tables; a quokka that knows only lower ones refuses to start
  shards         INTEGER NOT NULL, -- number of shards; fixed for ever
  log_secret     BLOB    NOT NULL, -- 32 bytes drawn at random; tokens and random numbers of handlers derive from it
  CONSTRAINT primary_meta PRIMARY KEY (id),
  CONSTRAINT one_row CHECK (id = 1)
) STRICT
