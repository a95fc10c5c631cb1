-- The ledger's tables; what each is for stands at the top of ledger.py.
CREATE TABLE run(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE coordinator_epochs(epoch INTEGER PRIMARY KEY, started_s REAL NOT NULL) STRICT;
CREATE TABLE incarnations(name TEXT PRIMARY KEY, role TEXT NOT NULL, place INTEGER NOT NULL,
  host TEXT NOT NULL, died TEXT) STRICT;
CREATE TABLE timelines(timeline INTEGER PRIMARY KEY, parent INTEGER, step INTEGER NOT NULL) STRICT;
CREATE TABLE steps(timeline INTEGER, step INTEGER, coordinator_epoch INTEGER NOT NULL,
  counter INTEGER NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY(timeline, step)) STRICT;
CREATE TABLE outcomes(timeline INTEGER, epoch INTEGER, batch INTEGER, step INTEGER NOT NULL,
  samples INTEGER NOT NULL, failed TEXT, poison INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY(timeline, epoch, batch)) STRICT;
CREATE TABLE skips(timeline INTEGER, epoch INTEGER, sample INTEGER, batch INTEGER NOT NULL,
  step INTEGER NOT NULL, reason TEXT NOT NULL, PRIMARY KEY(timeline, epoch, sample)) STRICT;
CREATE TABLE deaths(epoch INTEGER, batch INTEGER, count INTEGER NOT NULL, PRIMARY KEY(epoch, batch)) STRICT;
CREATE TABLE checkpoints(name TEXT PRIMARY KEY, timeline INTEGER NOT NULL, step INTEGER NOT NULL,
  sha256 TEXT NOT NULL, deleted INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE finished(timeline INTEGER NOT NULL, step INTEGER NOT NULL) STRICT;
