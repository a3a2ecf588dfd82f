// Flight recorder: the last calls of a rank in a group. They are kept in memory that other programs
// of this user can read even if the rank is stopped or hangs, and optionally in files.
//
// The memory is a place of a memfd, which the recorders of a process share: it has no name and
// disappears with the process. `pycomm top` finds it in /proc. The flight record is a copy, written
// when the group fails. The trace holds every call and is written in batches. All three consist of
// a FlightRecorderHead and CallRecords, which pycomm/observe/flight_recorder.py parses. One thread
// at a time may call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/deadline.h"
#include "os/fd.h"

namespace pycomm::observe {

// Times are nanoseconds of the steady clock.
struct CallRecord {
  enum class Outcome : uint8_t { under_way, done, failed };
  int64_t begun = 0, ended = 0;
  uint64_t count = 0;              // Call::count; for lists of counts the total of all ranks
  uint64_t bytes_written = 0;      // to peers
  int64_t waited = 0;              // blocked time without waits of microseconds
  uint32_t sequence = 0, tag = 0;  // as in frames: equal on all ranks of a call
  int32_t peer = 0;
  uint16_t epoch = 0;
  uint8_t operation = 0, dtype = 0, op = 0, algorithm = 0;
  Outcome outcome = Outcome::under_way;
  std::array<uint8_t, 5> unused{};
};
static_assert(sizeof(CallRecord) == 64);

struct FlightRecorderHead {
  std::array<char, 8> magic{'P', 'Y', 'C', 'O', 'M', 'M', 'J', '1'};
  uint64_t capacity = 0;               // of the ring of records; 0: all calls are kept
  uint64_t begun = 0;                  // calls; the last is at (begun - 1) % capacity
  int64_t steady_ns = 0, wall_ns = 0;  // the same moment by two clocks
  uint64_t calls = 0, bytes_written = 0, bytes_received = 0;  // of completed calls
  int64_t waited = 0, inside = 0;                             // nanoseconds
  uint64_t id = 0;  // of the group: unique, equal on its ranks
  int64_t pid = 0;
  int32_t rank = 0, size = 0;
  std::array<char, 128> name{};     // of the group
  std::array<char, 128> host{};     // host name
  std::array<char, 64> host_id{};   // equal for ranks that share a steady clock
  std::array<char, 1024> reason{};  // why the group broke; empty if it did not
  uint64_t closed = 0;              // 1: the group was closed
};

// Paths of the files; empty: no file. The group's name and the rank are appended.
struct FlightRecorderFiles {
  std::string record;  // prefix of the flight record's path
  std::string trace;   // the folder
};

// Throws InvalidArgument, naming the variable, if a file cannot be created. Creates the trace
// folder if necessary.
void check_files(const FlightRecorderFiles& files);

class FlightRecorder {
 public:
  FlightRecorder(const FlightRecorderHead& head, const FlightRecorderFiles& files);

  // Returns the number of the call.
  uint64_t begin(const CallRecord& record);
  // Totals of the group after the call. `failed`: it ended with an error.
  struct Totals {
    Clock::time_point now{};
    uint64_t bytes_written = 0, bytes_received = 0;
    std::chrono::nanoseconds waited{0};
  };
  void end(uint64_t call, const Totals& totals, bool failed);
  // Writes the flight record, unless one of a `breaking` error exists, and completes the trace.
  // Returns the record's path or why it could not be written; empty if no record is enabled.
  std::string keep(const std::string& reason, bool breaking);
  // The group is closed: completes the trace and releases the memory.
  void close() noexcept;

 private:
  class Place;
  CallRecord& slot(uint64_t call);
  void end_record(CallRecord& record, const Totals& totals, bool failed);
  void flush() noexcept;

  FlightRecorderFiles files_;     // complete paths
  std::shared_ptr<Place> place_;  // in the memory
  std::shared_ptr<std::byte> mapped_;
  FlightRecorderHead& head_;
  os::Fd trace_;
  uint64_t traced_ = 0;  // calls in the trace
  bool broken_ = false;  // a record of a breaking error was written
};

int64_t nanoseconds_of(Clock::time_point time);

}  // namespace pycomm::observe
