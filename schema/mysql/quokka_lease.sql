-- The office of the cluster's leader: one row, changed again and again by whoever holds it. Nothing that clients are promised depends on it.
CREATE TABLE IF NOT EXISTS quokka_lease (
  id     TINYINT UNSIGNED NOT NULL COMMENT 'always 1: the table has one row',
  holder VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NULL COMMENT 'the process that leads; NULL where the last one has laid the office down',
  member TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'its node as JSON: id and url',
  term   BIGINT UNSIGNED  NOT NULL COMMENT 'grows with every change of leader',
  beat   BIGINT UNSIGNED  NOT NULL COMMENT 'changed by the holder as long as it lives; whoever sees it stand still for too long may take the office',
  CONSTRAINT primary_lease PRIMARY KEY (id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC COMMENT='who leads the cluster'
