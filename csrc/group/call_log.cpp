#include "group/call_log.h"

#include "group/check.h"

namespace pycomm::group {

uint64_t CallLog::begin(const PreparedCall& prepared) {
  const auto lock = lock_calls();
  return recorder_.begin(record_of(prepared.call, prepared.job.header, prepared.deadline));
}

void CallLog::end(uint64_t call, const PreparedCall& prepared, const engine::EngineTraffic& traffic,
                  const shared::SharedMemoryRegion* region, bool failed) {
  const auto lock = lock_calls();
  if (region != nullptr) {
    shared_sent_ = region->bytes_sent;
    shared_received_ = region->bytes_received;
  }
  const auto now = Clock::now();
  totals_.frames_sent = traffic.frames_sent;
  totals_.bytes_sent = traffic.payload_sent + shared_sent_;
  totals_.bytes_written = traffic.bytes_written + shared_sent_;
  totals_.bytes_received = traffic.bytes_received + shared_received_;
  if (!failed) {
    ++totals_.calls;
    totals_.seconds += std::chrono::duration<double>(now - prepared.deadline.start()).count();
  }
  published_.store(totals_);
  recorder_.end(call,
                {.now = now,
                 .bytes_written = totals_.bytes_written,
                 .bytes_received = totals_.bytes_received,
                 .waited = traffic.waited},
                failed);
}

std::string CallLog::record_failure(const Error& error) {
  const auto keep = [&](bool breaking) {
    const std::lock_guard lock(mutex_);
    const std::string kept = recorder_.keep(error.what(), breaking);
    return kept.empty() ? kept : "; " + kept;
  };
  switch (error.kind()) {
    case ErrorKind::mismatch:
      return keep(false);
    case ErrorKind::timeout:
    case ErrorKind::peer_lost:
    case ErrorKind::group_broken:
    case ErrorKind::internal:
      return keep(true);
    case ErrorKind::invalid_argument:
    case ErrorKind::unsupported:
      break;  // no data was sent, and no peer knows
  }
  return {};
}

void CallLog::close() {
  const std::lock_guard lock(mutex_);
  recorder_.close();
}

Stats CallLog::stats() const {
  const Totals totals = published_.load();
  return {.calls = totals.calls,
          .frames_sent = totals.frames_sent,
          .bytes_sent = totals.bytes_sent,
          .bytes_written = totals.bytes_written,
          .bytes_received = totals.bytes_received,
          .seconds = totals.seconds};
}

}  // namespace pycomm::group
