// What a rank called in a group: the last calls in memory that this user's other programs can read
// while the rank runs, is stopped or hangs, and, where the user asked for it, in files.
//
// The memory is a memfd, which has no name and is gone with the process; `pycomm top` finds it in
// /proc. The flight record is a copy of it, written when something goes wrong. The trace has every
// call, and is written in batches. All three are a FlightRecorderHead and CallRecords behind it, as
// pycomm/flight_recorder.py reads them. Not statistics: those are in Stats. HostGroup writes it,
// one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/deadline.h"
#include "os/fd.h"

namespace pycomm {

// Times are nanoseconds of the steady clock.
struct CallRecord {
  enum class Outcome : uint8_t { under_way, done, failed };
  int64_t begun = 0, ended = 0;
  uint64_t count = 0;          // as of Call; of lists: of all ranks together
  uint64_t bytes_written = 0;  // to peers
  int64_t waited = 0;          // in which it could do nothing; waits of microseconds do not count
  uint32_t sequence = 0, tag = 0;  // as on the wire: equal on all ranks of a call
  int32_t peer = 0;
  uint16_t epoch = 0;
  uint8_t operation = 0, dtype = 0, op = 0, algorithm = 0;
  Outcome outcome = Outcome::under_way;
  std::array<uint8_t, 5> unused{};
};
static_assert(sizeof(CallRecord) == 64);

struct FlightRecorderHead {
  std::array<char, 8> magic{'P', 'Y', 'C', 'O', 'M', 'M', 'J', '1'};
  uint64_t capacity = 0;               // records that there is room for; 0: all are there
  uint64_t begun = 0;                  // calls; the last lies at (begun - 1) % capacity
  int64_t steady_ns = 0, wall_ns = 0;  // the same moment by two clocks
  uint64_t calls = 0, bytes_written = 0, bytes_received = 0;  // of what is over
  int64_t waited = 0, inside = 0;                             // nanoseconds
  uint64_t id = 0;  // of the group, the same on its ranks alone
  int64_t pid = 0;
  int32_t rank = 0, size = 0;
  std::array<char, 128> name{};     // of the group
  std::array<char, 128> host{};     // for people
  std::array<char, 64> host_id{};   // equal where the steady clock is the same
  std::array<char, 1024> reason{};  // why the group broke; empty: it has not
};

// Where the files go; empty: nowhere. Their names end in the group's name and the rank.
struct FlightRecorderFiles {
  std::string record;  // how the path of the record begins
  std::string trace;   // the folder
};

// Throws InvalidArgument where a file could not be made, naming the variable. Makes the folder of
// traces if there is none.
void check_files(const FlightRecorderFiles& files);

class FlightRecorder {
 public:
  FlightRecorder(const FlightRecorderHead& head, const FlightRecorderFiles& files);

  void begin(const CallRecord& record);
  // The totals after the call that began last; `failed`: it ended with an error.
  struct Totals {
    Clock::time_point now{};
    uint64_t bytes_written = 0, bytes_received = 0;
    std::chrono::nanoseconds waited{0};
  };
  void end(const Totals& totals, bool failed);
  // Keeps the flight record, unless there is one of a `breaking` error, and what the trace lacks.
  // Gives the record's path, or why it could not be written; empty where nobody asked for one.
  std::string keep(const std::string& reason, bool breaking);
  // The group is closed: writes what the trace still lacks, and others find this one no more.
  void close() noexcept;

 private:
  CallRecord& slot(uint64_t call);
  void flush() noexcept;

  FlightRecorderFiles files_;  // paths of the files by now
  Fd memory_;                  // open until close(), so that others find it
  std::shared_ptr<std::byte> mapped_;
  FlightRecorderHead& head_;
  Fd trace_;
  uint64_t traced_ = 0;  // calls that the trace has
  bool broken_ = false;  // the flight record of an error that broke the group is written
};

int64_t nanoseconds_of(Clock::time_point time);

}  // namespace pycomm
