-- Rows that are written only to make everything committed before them durable. A process writes to one of them.
CREATE TABLE IF NOT EXISTS quokka_barrier (
  slot   SMALLINT UNSIGNED NOT NULL COMMENT 'drawn at random by each process; sharing one is harmless',
  writes BIGINT UNSIGNED   NOT NULL COMMENT 'how often it was written',
  CONSTRAINT primary_barrier PRIMARY KEY (slot)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC COMMENT='written to make earlier commits durable'
