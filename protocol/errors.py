"""Every error draftmill raises on purpose, by what the caller can do about it.

DraftmillError
├── RetryError            the same call may succeed later: the caller waits, reconnects or asks again
│   ├── PeerGone          a process at the other end died or closed its socket
│   ├── ArenaFull         no space for a slot or a file right now (ENOSPC, all slots taken)
│   ├── DiskFull          no space where the ledger, a log or a checkpoint lies
│   ├── StalePack         a slot no longer holds what was announced, or its file was cut: discard it
│   └── GroupBroken       the drafters' process group lost a member: the step is tried again
└── FatalError            the caller gives up and tells the user: value, rule, remedy
    ├── ConfigError       an option, variable or file is wrong (all findings at once)
    ├── DataError         a dataset, sample or chat template breaks a rule
    ├── ModelError        target, tokenizer or drafter do not fit each other
    ├── CheckpointError   a checkpoint is truncated, of another run, or of a wrong layout
    ├── LedgerError       the ledger is of another run, damaged, or would record an outcome twice
    ├── CorruptPack       a slot's header or checksum is wrong although its attempt is current
    ├── DecodeError       bytes that are no message of this protocol (names message and field)
    ├── AlreadyRunning    another live process holds this run, endpoint or index
    ├── Fenced            this incarnation was declared dead: exit, never retry
    └── RunStopped        the run ended early for the reason given (failed ratio, poison, give-up)

A message names the thing, its value, the rule and the remedy, in that order.
"""


class DraftmillError(Exception):
    """Base of all errors raised on purpose."""


class RetryError(DraftmillError):
    """The same call may succeed later."""


class PeerGone(RetryError):
    """The process at the other end died or closed its socket."""


class ArenaFull(RetryError):
    """No space for a slot or an arena file right now."""


class DiskFull(RetryError):
    """No space where the ledger, a log or a checkpoint lies."""


class StalePack(RetryError):
    """The slot no longer holds the announced attempt."""


class GroupBroken(RetryError):
    """The drafters' process group lost a member."""


class FatalError(DraftmillError):
    """Nothing the caller does will make the same call succeed."""


class ConfigError(FatalError):
    """One or more options are wrong."""


class DataError(FatalError):
    """A dataset, sample or chat template breaks a rule."""


class ModelError(FatalError):
    """Target, tokenizer or drafter do not fit each other."""


class CheckpointError(FatalError):
    """A checkpoint cannot be used."""


class LedgerError(FatalError):
    """The ledger cannot be used, or would record an outcome twice."""


class CorruptPack(FatalError):
    """A current slot's header or checksum is wrong."""


class DecodeError(FatalError):
    """Bytes that are no message of this protocol."""


class AlreadyRunning(FatalError):
    """Another live process holds this run, endpoint or index."""


class Fenced(FatalError):
    """This incarnation was declared dead."""


class RunStopped(FatalError):
    """The run ended early for the reason given."""
