"""Memory orders of csrc that are weakened, one at a time.

The rows are as in mutations.py; the suite is weak_memory.
"""

ROWS: list[tuple[str, ...]] = []
_RELAXED = "std::memory_order_relaxed"
for _name, _file, _text, _test in [
    ("words_stored", "core/atomic_words.h", "store(words[i], {release}", "a published value is"),
    ("words_loaded", "core/atomic_words.h", "words_[i].load({acquire}", "a published value is"),
    ("version_stored", "core/atomic_words.h", "before + 2, {release}", "a published value is"),
    ("version_loaded", "core/atomic_words.h", "version_.load({acquire}", "a published value is"),
    ("flag_raised", "shared/flags.h", "value_.store(value, {release}", "a slot is read"),
    ("flag_read", "shared/flags.h", "value_.load({acquire}", "a slot is read"),
    ("call_published", "shared/flags.h", "number_.store(number, {release}", "number of a rank's"),
    ("call_read", "shared/flags.h", "number_.load({acquire}", "number of a rank's"),
    ("free_space", "transport/ring_positions.h", "head_.read.load({acquire}", "a ring of one"),
    ("bytes_read", "transport/ring_positions.h", "head_.written.load({acquire}", "a ring of one"),
]:
    _old = _text.format(release="std::memory_order_release", acquire="std::memory_order_acquire")
    _order = _old[_old.index("std::") :]
    ROWS.append(
        (f"relaxed_{_name}", _file, _old, _old.replace(_order, _RELAXED), "weak_memory", _test)
    )
for _name, _file, _old, _new, _test in [
    (
        "bytes_published",
        "transport/ring_positions.h",
        "store(written_);",
        "store(written_, {r});",
        "a ring of one",
    ),
    (
        "bytes_taken",
        "transport/ring_positions.h",
        "store(read_);",
        "store(read_, {r});",
        "a ring of one",
    ),
    (
        "sleep_claimed",
        "core/sleep_flag.h",
        "asleep_.load() != 0",
        "asleep_.load({a}) != 0",
        "a ring of one",
    ),
    (
        "armed_without_fence",
        "core/sleep_flag.h",
        "    Atomics::store_load_fence();\n",
        "",
        "a slot is read",
    ),
    (
        "raised_without_fence",
        "shared/flags.h",
        "  Atomics::store_load_fence();\n",
        "",
        "a slot is read",
    ),
    (
        "own_sleep_claimed",
        "shared/flags.h",
        "i != own && flag",
        "own >= 0 && flag",
        "its own sleep",
    ),
]:
    _new = _new.format(r="std::memory_order_release", a="std::memory_order_acquire")
    ROWS.append((f"weaker_{_name}", _file, _old, _new, "weak_memory", _test))
