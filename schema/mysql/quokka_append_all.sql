-- Several INSERTs, of several tables, in one transaction that never outlives the call: whoever sends it may freeze at any moment and holds no lock.
-- `statements` holds them without anything between, `lengths` their lengths in characters with commas between. Made when first needed.
CREATE PROCEDURE IF NOT EXISTS quokka_append_all(IN statements LONGTEXT CHARACTER SET utf8mb4, IN lengths LONGTEXT CHARACTER SET ascii)
MODIFIES SQL DATA SQL SECURITY INVOKER COMMENT 'several INSERTs in one transaction'
BEGIN
  DECLARE place INT UNSIGNED DEFAULT 1;
  DECLARE length INT UNSIGNED DEFAULT 0;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
  START TRANSACTION;
  WHILE lengths <> '' DO
    SET length = CAST(SUBSTRING_INDEX(lengths, ',', 1) AS UNSIGNED);
    SET @quokka_statement = SUBSTRING(statements, place, length);
    PREPARE quokka_statement FROM @quokka_statement;
    EXECUTE quokka_statement;
    SET place = place + length;
    SET lengths = SUBSTRING(lengths, LOCATE(',', CONCAT(lengths, ',')) + 1);
  END WHILE;
  COMMIT;
  DEALLOCATE PREPARE quokka_statement;
  SET @quokka_statement = NULL;
END
