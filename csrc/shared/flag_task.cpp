#include "shared/flag_task.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>
#include <vector>

namespace pycomm::shared {
namespace {

uint32_t signature_of(const transport::Header& header, uint32_t before) {
  uint64_t hash = 0xcbf29ce484222325 ^ before;
  for (const uint64_t word : std::bit_cast<std::array<uint64_t, 4>>(header)) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return static_cast<uint32_t>(hash);
}

}  // namespace

FlagTask::FlagTask(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job,
                   uint64_t tickets, uint64_t align)
    : engine_(engine), region_(region), job_(job), rank_(region.rank()), size_(region.size()) {
  if (region.begin_epoch(job.header.epoch)) publish(region.own().done, region.base());
  first_ = region.take(tickets, align);
  before_ = std::exchange(region.last, job.header);
  signature_ = region.signature = signature_of(job.header, region.signature);
}

bool FlagTask::is_missing(int peer, const Flag<>& flag, uint64_t need) {
  if (flag.reached(need)) return false;
  awaited_ = peer;
  awaited_flag_ = &flag;
  awaited_value_ = need;
  return true;
}

// A slot is free when all ranks have read it. The flag is loaded only once per several tickets,
// because a load takes the line from its owner's cache.
bool FlagTask::may_fill(uint64_t ticket) {
  const uint64_t need = std::max(region_.base(), ticket < kSlots ? 0 : ticket + 1 - kSlots);
  for (int peer = 0; peer < size_; ++peer) {
    uint64_t& known = region_.known_done(peer);
    if (peer == rank_ || known >= need) continue;
    const auto& done = region_.of(peer).done;
    if (is_missing(peer, done, need)) return false;
    known = done.value();
  }
  return true;
}

bool FlagTask::has_filled(int peer, uint64_t ticket) {
  if (peer == rank_) return true;
  const auto& filled = region_.of(peer).filled[ticket % kSlots];
  if (is_missing(peer, filled.flag, ticket + 1)) return false;
  if (filled.signature != signature_) throw_mismatch(peer, ticket);
  return true;
}

// A one-directional call can end before a rank has received anything from its peers. Then the next
// call detects the mismatch.
void FlagTask::throw_mismatch(int peer, uint64_t ticket) {
  const auto& theirs = region_.of(peer).reduced[ticket % kSlots];
  const transport::Header header = theirs.header.load(), before = theirs.before.load();
  const int member = region_.member(peer);
  if (!engine::same_call(header, job_.header)) engine_.mismatches().throw_mismatch(member, header);
  const std::string other = engine::same_call(before, before_)
                                ? std::string("not the last one")
                                : "this rank called " + engine::describe(before_) + ", rank " +
                                      std::to_string(member) + " called " +
                                      engine::describe(before);
  engine_.mismatches().abort_call(member, before_.sequence,
                                  "ranks disagree about a call before " +
                                      engine::describe(job_.header) + ": " + other +
                                      "; what it writes is undefined");
}

bool FlagTask::have_reduced(uint64_t ticket) {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ &&
        is_missing(peer, region_.of(peer).reduced[ticket % kSlots].flag, ticket + 1))
      return false;
  return true;
}

// A rank that aborted the call may already reuse its array. The engine receives the reason.
bool FlagTask::all_in_call() {
  for (int peer = 0; peer < size_; ++peer)
    if (!region_.is_in(peer, job_.header)) {
      awaited_ = peer;
      awaited_flag_ = nullptr;
      return false;
    }
  return true;
}

void FlagTask::publish(Flag<>& flag, uint64_t value) {
  flag.raise(value);
  wake_sleepers();
}

void FlagTask::wake_sleepers() {
  const auto sleeps_of = [&](int peer) -> SleepFlag<>& { return region_.of(peer).sleeps; };
  shared::wake_sleepers(size_, rank_, sleeps_of,
                        [&](int peer) { engine_.wake_peer(region_.member(peer)); });
}

void FlagTask::arm() {
  region_.own().sleeps.arm();
  transport::Header theirs;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && region_.differs(peer, job_.header, theirs))
      engine_.mismatches().throw_mismatch(region_.member(peer), theirs);
  // A peer in a later call has finished this one, so the missing flag will never be set.
  if (awaited_ != collectives::kNoRank && awaited_flag_ != nullptr &&
      region_.is_past(awaited_, job_.header, theirs) && !awaited_flag_->reached(awaited_value_))
    engine_.mismatches().throw_mismatch_on_end(region_.member(awaited_), theirs);
}

void FlagTask::disarm() {
  region_.own().sleeps.disarm();
  region_.publish_processor();  // the system may wake this thread on another one
}

// Two ranks on one processor can stay there for long: each sleeps in turn, so the system sees no
// load to balance.
std::optional<bool> FlagTask::leave_processor_of_peer(os::ProcessorExclusion& exclusion) {
  const int here = region_.publish_processor();
  if (awaited_ == collectives::kNoRank || here == os::kUnknownProcessor ||
      region_.processor_of(awaited_) != here)
    return true;
  std::vector<int> taken;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) taken.push_back(region_.processor_of(peer));
  const bool left = exclusion.leave(here, taken);
  (void)region_.publish_processor();
  return left;
}

// Publishes the filled slot, with the headers of the call.
void FlagTask::publish_filled(uint64_t ticket, bool now) {
  Segment& own = region_.own();
  auto& filled = own.filled[ticket % kSlots];
  filled.signature = signature_;
  own.reduced[ticket % kSlots].header.store(job_.header);
  own.reduced[ticket % kSlots].before.store(before_);
  filled.flag.raise(ticket + 1);
  if (now) wake_sleepers();
}

}  // namespace pycomm::shared
