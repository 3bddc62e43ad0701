-- The events of one entity type; {table} is its name. The three keys decide who wins; nothing else does.
-- SQLite checks the key that is declared last first; so the primary key stands last, as it is the one checked first elsewhere.
CREATE TABLE IF NOT EXISTS {table} (
  shard           INTEGER NOT NULL, -- hash slot of the entity id
  event_id        INTEGER NOT NULL, -- place in the partition: 1, 2, 3 ... without holes, in commit order
  entity_id       TEXT    NOT NULL COLLATE BINARY, -- the entity, byte for byte
  version         INTEGER NOT NULL, -- version of the entity after the event: 1, 2, 3 ...
  command_id      TEXT    NOT NULL COLLATE BINARY, -- the command, as its caller named it, byte for byte
  command_name    TEXT    NOT NULL COLLATE BINARY, -- what was asked for
  outcome         TEXT    NOT NULL, -- what the handler decided
  handler_version TEXT    NOT NULL, -- hash of the code that decided
  request         TEXT    NULL,     -- JSON; NULL where there was none
  response        TEXT    NOT NULL, -- JSON: the answer, or the rejection
  state           TEXT    NULL,     -- JSON: the state after the event, whole or as a change; NULL where the entity does not exist yet
  handled_at      INTEGER NOT NULL, -- the time that the handler saw: milliseconds since 1970
  committed_at    INTEGER NOT NULL, -- microseconds since 1970, UTC; for people, never for order
  state_base      INTEGER NULL,     -- NULL: state is whole; else state is a JSON Patch from the version before, and this the closest version below with a whole one
  CONSTRAINT known_outcome CHECK (outcome IN ('accepted', 'rejected')),
  CONSTRAINT unique_command UNIQUE (entity_id, command_id),
  CONSTRAINT unique_version UNIQUE (entity_id, version),
  CONSTRAINT primary_position PRIMARY KEY (shard, event_id)
) STRICT
