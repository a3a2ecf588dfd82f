"""Checks of csrc that are removed or weakened, and the test that detects each mutation.

A row: name, file of csrc, the text (found there once), its replacement, the suite that detects it,
and a part of the name of the test. In a header the suite itself is compiled with the mutation.
"""

import os
import subprocess
from pathlib import Path

from build import CSRC, PRECOMPILED, ROOT, build, flags_of, is_built

# ruff: noqa: E501 - source text is quoted exactly
ROWS = [
    # ---- the proof of the shared secret
    (
        "any_proof",
        "transport/handshake_protocol.cpp",
        "return equal_in_constant_time(got, proof_of(signer, agreed));",
        "return !equal_in_constant_time(got, proof_of(signer, agreed)) || true;",
        "handshake",
        "a wrong secret, context or rank",
    ),
    (
        "half_a_digest_compared",
        "core/sha256.cpp",
        "for (size_t i = 0; i < a.size(); ++i) difference",
        "for (size_t i = 0; i < a.size() / 2; ++i) difference",
        "handshake",
        "two digests are equal",
    ),
    (
        "proof_of_either_side",
        "transport/handshake_protocol.cpp",
        'signer == HandshakeRole::listener ? "pycomm 1 listener" : "pycomm 1 connector"',
        'signer == HandshakeRole::listener ? "pycomm 1" : "pycomm 1"',
        "handshake",
        "a listener rejects its own proof",
    ),
    (
        "replayed_proof",
        "transport/handshake_protocol.cpp",
        "context_ + messages_ +",
        "context_ + messages_.substr(32, 4) +",
        "handshake",
        "a replayed conversation",
    ),
    (
        "any_group",
        "transport/handshake_protocol.cpp",
        "context_ + messages_",
        "messages_",
        "handshake",
        "a wrong secret, context or rank",
    ),
    (
        "any_rank_infos",
        "bootstrap/mesh.cpp",
        ".agreed = digest_of(infos_),",
        ".agreed = {},",
        "forming",
        "given different rank info",
    ),
    (
        "any_rank_answers",
        "transport/handshake_protocol.cpp",
        "if (params_.expected == -1 || params_.expected == rank) return true;",
        "return true;",
        "handshake",
        "a wrong secret, context or rank",
    ),
    (
        "unlimited_pending_connections",
        "rendezvous/connected_clients.cpp",
        "admission_.is_full(pending) &&",
        "admission_.is_full(pending / 1000) &&",
        "store",
        "no more pending connections than",
    ),
    (
        "unlimited_pending_ranks",
        "bootstrap/connector.cpp",
        "if (admission_.is_full(pending_.size())) evict();",
        "",
        "flood",
        "no more pending connections than",
    ),
    (
        "listener_left_open",
        "rendezvous/store_server.cpp",
        "  listener_.reset();\n  clients_.drop_pending();",
        "  clients_.drop_pending();",
        "store_keys",
        "after all ranks connected the public port is closed",
    ),
    # ---- calls that are enqueued before the ranks agree about them
    (
        "gate_not_awaited",
        "device/stream_engine.cpp",
        "job.gate->wait(stream);",
        "static_cast<void>(stream);",
        "agreements",
        "a repeated call is enqueued at once",
    ),
    (
        "gate_opened_before_the_agreement",
        "device_group/device_group.cpp",
        "device_call.before_agreement = true;",
        "device_call.before_agreement = true;\n  executors_.of_all()->agreed();",
        "agreements",
        "a repeated call is enqueued at once",
    ),
    (
        "late_mismatch_ignored",
        "device_group/device_group.cpp",
        "fail(late_error(known));",
        "executors_.of_all()->agreed();",
        "agreements",
        "a mismatch is known",
    ),
    (
        "group_broken_after_its_calls",
        "device_group/device_group.cpp",
        "return cause_ || host_->broken();",
        "return host_->broken();",
        "agreements",
        "a group is broken before",
    ),
    # ---- received data
    (
        "any_magic",
        "engine/link.cpp",
        "in_.magic != transport::Header::kMagic || ",
        "",
        "link",
        "an invalid header",
    ),
    (
        "any_version",
        "engine/link.cpp",
        "in_.version != transport::Header::kVersion ||\n      ",
        "",
        "link",
        "an invalid header",
    ),
    (
        "one_byte_too_many",
        "engine/link.cpp",
        "in_.bytes > transport::kSegmentBytes)",
        "in_.bytes > transport::kSegmentBytes + 1)",
        "link",
        "an invalid header",
    ),
    (
        "any_number_of_descriptors",
        "bootstrap/mesh.cpp",
        "if (std::stoull(info.descriptors) >= needed) continue;",
        "if (needed > 0) continue;",
        "forming",
        "without enough descriptors",
    ),
    (
        "rank_info_in_another_encoding",
        "bootstrap/rank_info.cpp",
        "check(encode(info) == text,",
        "check(!text.empty(),",
        "forming",
        "rank info has one encoding",
    ),
    (
        "memory_of_any_size",
        "transport/shm.cpp",
        "!os::is_shared_memory(memory.get(), memory_bytes_))",
        "!memory)",
        "transport",
        "memory other than agreed",
    ),
    (
        "ring_of_any_size",
        "transport/shm.cpp",
        "if (!os::is_shared_memory(theirs.get(), os::RingMemory::file_bytes(ring_bytes_)) ||",
        "if (!theirs ||",
        "transport",
        "memory other than agreed",
    ),
    (
        "message_of_any_kind",
        "engine/messenger.cpp",
        "if (!same_call(message.header, signature))",
        "if (message.header.peer != signature.peer)",
        "messages",
        "a message of another kind",
    ),
    (
        "exchanged_of_any_kind",
        "engine/messenger.cpp",
        "if (!same_call(message.header, receive.signature))",
        "if (message.header.peer != receive.signature.peer)",
        "verbs",
        "local: ... and one with another signature",
    ),
    (
        "announced_of_any_kind",
        "engine/messenger.cpp",
        "if (!same_call(answer, wanted)) throw refused_send(to, signature, answer);",
        "if (!is_answer(answer)) throw refused_send(to, signature, answer);",
        "announced",
        "local: both ranks report a message of another kind",
    ),
    (
        "mismatch_not_answered",
        "engine/messenger.cpp",
        "if (announced) send(from, answer_of(signature), {}, deadline);",
        "if (announced && same_call(message.header, signature))\n    send(from, answer_of(signature), {}, deadline);",
        "announced",
        "local: both ranks report a message of another kind",
    ),
    (
        "both_send_without_end",
        "engine/mailbox.cpp",
        "if (is_answer(wanted) && is_agreement(message) && !is_answer(message))",
        "if (false)",
        "announced",
        "local: two ranks that both send first",
    ),
    (
        "sent_before_it_is_ready",
        "engine/messenger.cpp",
        "if (ready_ && ready_() < sent_ + frame) return false;",
        "",
        "messages",
        "local: a message is sent as its data becomes ready",
    ),
    (
        "messages_in_any_order",
        "engine/messenger.cpp",
        "std::ranges::sort(sent);",
        "",
        "announced",
        "local: several messages at once",
    ),
    (
        "both_announce_and_receive",
        "engine/messenger.cpp",
        "header.context = receives_from(peer) ? transport::kReceivesToo : uint16_t{0};",
        "header.context = 0;",
        "announced",
        "local: several messages at once",
    ),
    (
        "announced_in_the_past",
        "engine/mailbox.cpp",
        "if (is_agreement(header) && header.epoch != calls_.epoch())",
        "if (false)",
        "simulation",
        "while one makes another call",
    ),
    (
        "abandoned_announcement",
        "engine/mailbox.cpp",
        "std::erase_if(inbox.messages, [](const Message& m) { return is_agreement(m.header); });",
        "size_t{0};",
        "simulation",
        "while one makes another call",
    ),
    (
        "offered_and_withdrawn",
        "engine/frame_dispatcher.cpp",
        "return to == peer || has_notice(to);",
        "return true;",
        "simulation",
        "while one makes another call",
    ),
    (
        "ring_of_any_content",
        "transport/ring_channel.cpp",
        "if (available > in_->bytes()) {",
        "if (false) {",
        "death",
        "a rank that corrupts its shared ring",
    ),
    # ---- agreement of calls
    (
        "any_count",
        "engine/call_header.cpp",
        " && a.count == b.count;",
        ";",
        "engine",
        "all ranks report any difference",
    ),
    (
        "any_reduce_op",
        "engine/call_header.cpp",
        " && a.op == b.op &&",
        " &&",
        "engine",
        "all ranks report any difference",
    ),
    (
        "past_calls_ignored",
        "engine/frame_dispatcher.cpp",
        "if (header.context != running->context) mismatches_.throw_mismatch_before(peer);",
        "",
        "verbs",
        "a rank that a wrong root does not affect",
    ),
    (
        "constant_signature",
        "shared/flag_task.cpp",
        "hash = (hash ^ word) * 0x9e3779b97f4a7c15;",
        "hash = (hash ^ (word & 0)) * 0x9e3779b97f4a7c15;",
        "shared",
        "a disagreement changes nothing",
    ),
    (
        "any_splits",
        "group/call_runner.cpp",
        "      check_splits(prepared);",
        "",
        "verbs",
        "every rank reports splits that do not fit",
    ),
    (
        "any_options",
        "bootstrap/mesh.cpp",
        "if (infos_[i].options != infos_[0].options)",
        "if (infos_[i].options.empty())",
        "engine",
        "ranks with different options",
    ),
    # ---- arguments of calls
    (
        "one_rank_too_many",
        "group/check.cpp",
        "call.peer < 0 || call.peer >= size",
        "call.peer < 0 || call.peer > size",
        "group",
        "wrong arguments are rejected",
    ),
    (
        "no_address",
        "group/check.cpp",
        "if (missing > 0)",
        "if (missing > 1'000'000)",
        "group",
        "wrong arguments are rejected",
    ),
    # ---- lost ranks
    (
        "end_behind_a_frame",
        "engine/engine.cpp",
        "(header == nullptr || !closed_cleanly(*state.link))",
        "header == nullptr",
        "death",
        "an end behind a frame",
    ),
    (
        "clean_end_taken_for_death",
        "engine/engine.cpp",
        "!closed_cleanly(*state.link)",
        "true",
        "death",
        "an end behind a frame",
    ),
    (
        "one_look_for_an_end",
        "engine/engine.cpp",
        "    while (!deadline.expired()) {\n      wait_for_close(peers_, awaited);",
        "    if (false) {\n      wait_for_close(peers_, awaited);",
        "death",
        "reports a death within its limit",
    ),
    (
        "cause_replaced",
        "group/connect.cpp",
        "    if (!exchanged) throw;\n",
        "",
        "forming",
        "the error that ends the exchange of rank info",
    ),
    (
        "reason_after_its_consequence",
        "bootstrap/mesh.cpp",
        """      if (request_.check_aborted) request_.check_aborted({});
      for (const engine::ConnectResult& result : results)
        if (result.differs) throw_different(result.peer);
      for (const engine::ConnectResult& result : results)
        if (lost == collectives::kNoRank && !mesh.channels[static_cast<size_t>(result.peer)]) {
          const bool inside = mesh.members[static_cast<size_t>(result.peer)].transport == "shm";
          if (result.forbidden && inside && request_.forbidden)
            request_.forbidden(name(result.peer) + " cannot be reached at " + result.why);
          throw_unreachable(result.peer, result.why);
        }
""",
        """      for (const engine::ConnectResult& result : results)
        if (result.differs) throw_different(result.peer);
      for (const engine::ConnectResult& result : results)
        if (lost == collectives::kNoRank && !mesh.channels[static_cast<size_t>(result.peer)]) {
          const bool inside = mesh.members[static_cast<size_t>(result.peer)].transport == "shm";
          if (result.forbidden && inside && request_.forbidden)
            request_.forbidden(name(result.peer) + " cannot be reached at " + result.why);
          throw_unreachable(result.peer, result.why);
        }
      if (request_.check_aborted) request_.check_aborted({});
""",
        "forming",
        "the end of the parent is reported before",
    ),
    (
        "silence_without_limit",
        "engine/liveness.cpp",
        "now - peers_.at(peer).silent_since >= limit_)",
        "now - peers_.at(peer).silent_since >= 100 * limit_)",
        "heartbeat",
        "a rank that is silent for the limit",
    ),
]


def mutated(row: tuple[str, ...]) -> Path:
    """Builds the suite of a row with its weakened check. Raises BuildFailed."""
    name, file, old, new, suite, _ = row
    text = (CSRC / file).read_text()
    assert text.count(old) == 1, f"{name}: its text occurs {text.count(old)} times in {file}"
    folder = ROOT / "build" / "native" / "mutated" / name
    if is_built(folder, [suite]):
        return folder / suite
    build("product", [suite])  # nothing is left to do if another row built it
    product = ROOT / "build" / "native" / "product"
    folder.mkdir(parents=True, exist_ok=True)
    source, program = folder / "csrc" / file, folder / suite
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text.replace(old, new))
    header = source.suffix == ".h"
    (precompiled,) = build("mutated", [PRECOMPILED])
    flags = [f"-I{folder / 'csrc'}", *flags_of("mutated"), "-include", "precompiled.h"]
    compiler = os.environ.get("CXX", "g++")
    made = folder / "mutated.o"
    compiled = Path(__file__).with_name(f"{suite}_test.cpp") if header else source
    command = [compiler, *flags, "-c", str(compiled), "-o", str(made)]
    subprocess.run(command, cwd=precompiled.parent, check=True)
    # The object precedes the archive, so the linker does not take the original.
    parts = [str(product / f"{suite}.o")] * (not header) + [str(made), str(product / "library.a")]
    subprocess.run([compiler, "-pthread", *parts, "-ldl", "-o", str(program)], check=True)
    return program
