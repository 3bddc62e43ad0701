-- What the whole database agrees on: one row, written when quokka first uses it.
CREATE TABLE IF NOT EXISTS quokka_meta (
  id             TINYINT UNSIGNED  NOT NULL COMMENT 'always 1: the table has one row',
  schema_version INT UNSIGNED      NOT NULL COMMENT 'version of the tables; a quokka that knows only lower ones refuses to start',
  shards         SMALLINT UNSIGNED NOT NULL COMMENT 'number of shards; fixed for ever',
  log_secret     BINARY(32)        NOT NULL COMMENT 'drawn at random; tokens and random numbers of handlers derive from it',
  CONSTRAINT primary_meta PRIMARY KEY (id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC COMMENT='what the whole database agrees on'
