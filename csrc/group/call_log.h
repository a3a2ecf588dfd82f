// What a rank records of the calls of a group: totals and the flight record.
#pragma once

#include <mutex>
#include <string>

#include "core/atomic_words.h"
#include "core/deadline.h"
#include "core/errors.h"
#include "engine/engine.h"
#include "group/group.h"
#include "group/prepared_call.h"
#include "observe/flight_recorder.h"
#include "shared/shared_memory_region.h"

namespace pycomm::group {

// The thread whose turn it is writes, and with `thread_multiple` threads with messages; any thread
// reads the totals.
class CallLog {
 public:
  CallLog(const observe::FlightRecorderHead& head, const observe::FlightRecorderFiles& files,
          bool thread_multiple)
      : recorder_(head, files), thread_multiple_(thread_multiple) {}

  // Returns the number of the call.
  uint64_t begin(const PreparedCall& prepared);
  // The call ended. `region`: the memory that it may have used, or null: none.
  void end(uint64_t call, const PreparedCall& prepared, const engine::EngineTraffic& traffic,
           const shared::SharedMemoryRegion* region, bool failed);
  // Writes a flight record for an error and returns the text that the error adds about it. The
  // error that breaks the group overwrites the record of an earlier Mismatch.
  std::string record_failure(const Error& error);
  void close();

  Stats stats() const;

 private:
  struct Totals {
    uint64_t calls = 0, frames_sent = 0, bytes_sent = 0, bytes_written = 0, bytes_received = 0;
    double seconds = 0;
  };

  std::unique_lock<std::mutex> lock_calls() {
    return thread_multiple_ ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();
  }

  // Guards the files of recorder_: close() may follow abort() on another thread. With
  // thread_multiple, guards everything.
  std::mutex mutex_;
  observe::FlightRecorder recorder_;
  const bool thread_multiple_;
  uint64_t shared_sent_ = 0, shared_received_ = 0;  // by shared memory
  Totals totals_;
  Published<Totals> published_;
};

}  // namespace pycomm::group
