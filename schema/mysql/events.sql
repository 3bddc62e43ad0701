-- The events of one entity type; {table} is its name. The three keys decide who wins; nothing else does.
CREATE TABLE IF NOT EXISTS {table} (
  shard           SMALLINT UNSIGNED NOT NULL COMMENT 'hash slot of the entity id',
  event_id        BIGINT UNSIGNED NOT NULL COMMENT 'place in the partition: 1, 2, 3 ... without holes, in commit order',
  entity_id       VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'the entity, byte for byte',
  version         BIGINT UNSIGNED NOT NULL COMMENT 'version of the entity after the event: 1, 2, 3 ...',
  command_id      VARCHAR(256) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'the command, as its caller named it, byte for byte',
  command_name    VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'what was asked for',
  outcome         ENUM('accepted', 'rejected') CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'what the handler decided',
  handler_version VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'hash of the code that decided',
  request         LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL COMMENT 'JSON; NULL where there was none',
  response        LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'JSON: the answer, or the rejection',
  state           LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL COMMENT 'JSON: the state after the event, whole or as a change; NULL where the entity does not exist yet',
  handled_at      BIGINT NOT NULL COMMENT 'the time that the handler saw: milliseconds since 1970',
  committed_at    DATETIME(6) NOT NULL COMMENT 'UTC by the clock of the database; for people, never for order',
  state_base      BIGINT UNSIGNED NULL COMMENT 'NULL: state is whole; else state is a JSON Patch from the version before, and this the closest version below with a whole one',
  CONSTRAINT primary_position PRIMARY KEY (shard, event_id),
  UNIQUE KEY unique_version (entity_id, version),
  UNIQUE KEY unique_command (entity_id, command_id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC COMMENT='events of an entity type'
