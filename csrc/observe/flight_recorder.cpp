#include "observe/flight_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <new>
#include <system_error>
#include <vector>

#include "core/atomics.h"
#include "core/errors.h"
#include "os/shared_memory.h"

namespace pycomm::observe {
namespace {

namespace fs = std::filesystem;

// Calls kept in memory; also the number of calls that one write adds to a trace.
constexpr uint64_t kKept = 256, kBatch = 128;
constexpr size_t kHeadBytes = 4096;  // one page, followed by the records
constexpr size_t kBytes = kHeadBytes + kKept * sizeof(CallRecord);
static_assert(sizeof(FlightRecorderHead) <= kHeadBytes);

// "world/0.1" and rank 2 as "world-0.1.2": no folder of its own.
std::string suffix(const FlightRecorderHead& head) {
  std::string name = head.name.data();
  std::ranges::replace(name, '/', '-');
  return name + "." + std::to_string(head.rank);
}

// Throws std::system_error. Returns the offset after the written bytes.
off_t write_at(const os::Fd& file, const void* data, size_t bytes, off_t at) {
  const auto* from = static_cast<const std::byte*>(data);
  for (size_t done = 0; done < bytes;) {
    const ssize_t n =
        ::pwrite(file.get(), from + done, bytes - done, at + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw std::system_error(errno, std::generic_category());
    done += static_cast<size_t>(n);
  }
  return at + static_cast<off_t>(bytes);
}

// File names are predictable, and the folder may be writable for all, as /tmp is. A symbolic link
// there could overwrite a file of this user, and a named pipe could block the rank.
os::Fd create(const std::string& path) {
  os::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
  const int error = errno;
  if (!file && error == ELOOP)
    throw std::system_error(error, std::generic_category(),
                            "the path is a symbolic link, which is not followed: remove it");
  if (!file) throw std::system_error(error, std::generic_category());
  struct stat found{};
  if (::fstat(file.get(), &found) != 0) throw std::system_error(errno, std::generic_category());
  if (!S_ISREG(found.st_mode))
    throw std::system_error(EEXIST, std::generic_category(), "the path is not a regular file");
  if (found.st_uid != ::geteuid())
    throw std::system_error(EPERM, std::generic_category(), "the file belongs to another user");
  if (::ftruncate(file.get(), 0) != 0) throw std::system_error(errno, std::generic_category());
  return file;
}

void check_folder(const fs::path& folder, const std::string& variable, const std::string& value) {
  if (::access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) == 0) return;
  throw InvalidArgument("invalid " + variable + " '" + value + "': cannot create a file in " +
                            folder.string() + ": " + std::generic_category().message(errno),
                        {.op = "init"});
}

}  // namespace

int64_t nanoseconds_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

void check_files(const FlightRecorderFiles& files) {
  if (!files.record.empty())
    check_folder(fs::path(files.record).parent_path(), "PYCOMM_FLIGHT_RECORD", files.record);
  if (files.trace.empty()) return;
  std::error_code failed;  // access() reports the failure
  fs::create_directories(files.trace, failed);
  check_folder(files.trace, "PYCOMM_TRACE", files.trace);
}

// Descriptors are scarce where a process has hundreds of groups: kPlaces recorders share one.
class FlightRecorder::Place {
 public:
  static constexpr size_t kPlaces = 64;

  Place() {
    const std::lock_guard lock(mutex());
    static auto* const known = new std::vector<std::weak_ptr<Memory>>;  // never destroyed
    std::erase_if(*known, [](const auto& one) { return one.expired(); });
    for (const auto& one : *known)  // a forked process has no descriptor of its parent's
      if (auto memory = one.lock(); memory && memory->fd && !memory->taken.all())
        open_ = std::move(memory);
    if (!open_) known->push_back(open_ = std::make_shared<Memory>());
    while (open_->taken.test(index_)) ++index_;
    open_->taken.set(index_);
    memory_ = open_;
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() {
    const std::lock_guard lock(mutex());
    if (const auto memory = memory_.lock()) memory->taken.reset(index_);
  }

  std::shared_ptr<std::byte> map() const {
    return os::map_shared_memory(open_->fd.get(), kBytes, index_ * kBytes);
  }
  // False after close(), and in a forked process.
  bool is_open() const { return open_ && open_->fd; }
  // The descriptor is closed with the last recorder's.
  void close() { open_.reset(); }

 private:
  struct Memory {
    os::Fd fd = os::make_shared_memory(kPlaces * kBytes, "pycomm-flight-recorder");
    std::bitset<kPlaces> taken{};
  };
  static std::mutex& mutex() {
    static auto* const one = new std::mutex;
    return *one;
  }

  std::shared_ptr<Memory> open_;  // until close(), so that other processes find it
  std::weak_ptr<Memory> memory_;
  size_t index_ = 0;
};

FlightRecorder::FlightRecorder(const FlightRecorderHead& head, const FlightRecorderFiles& files)
    : files_(files),
      place_(std::make_shared<Place>()),
      mapped_(place_->map()),
      head_(*new (mapped_.get()) FlightRecorderHead(head)) {
  head_.capacity = kKept;
  if (!files_.record.empty()) files_.record += "." + suffix(head_);
  if (files_.trace.empty()) return;
  files_.trace += "/" + suffix(head_) + ".trace";
  try {
    trace_ = create(files_.trace);
  } catch (const std::system_error& error) {
    throw InvalidArgument("init: cannot create the trace " + files_.trace + ": " + error.what(),
                          {.op = "init", .rank = head_.rank});
  }
  flush();
}

CallRecord& FlightRecorder::slot(uint64_t call) {
  auto* const first = reinterpret_cast<CallRecord*>(mapped_.get() + kHeadBytes);
  return first[call % kKept];
}

// Another process may read at any time. A reader accepts a record if it is unchanged at the second
// read of `begun` and is not next to be overwritten. So `begun` is stored after the record, and the
// next record after `begun`.
uint64_t FlightRecorder::begin(const CallRecord& record) {
  StdAtomics::release_fence();
  slot(head_.begun) = record;
  __atomic_store_n(&head_.begun, head_.begun + 1, __ATOMIC_RELEASE);
  return head_.begun - 1;
}

void FlightRecorder::end_record(CallRecord& record, const Totals& totals, bool failed) {
  record.bytes_written = totals.bytes_written - head_.bytes_written;
  record.waited = totals.waited.count() - head_.waited;
  record.outcome = failed ? CallRecord::Outcome::failed : CallRecord::Outcome::done;
  __atomic_store_n(&record.ended, nanoseconds_of(totals.now), __ATOMIC_RELEASE);
  head_.inside += record.ended - record.begun;
}

// The record of a call that began long ago may be overwritten.
void FlightRecorder::end(uint64_t call, const Totals& totals, bool failed) {
  if (head_.begun - call <= kKept) end_record(slot(call), totals, failed);
  ++head_.calls;
  head_.waited = totals.waited.count();
  head_.bytes_written = totals.bytes_written;
  head_.bytes_received = totals.bytes_received;
  if (trace_ && head_.begun - traced_ >= kBatch) flush();
}

std::string FlightRecorder::keep(const std::string& reason, bool breaking) {
  if (broken_) return {};
  broken_ = breaking;
  head_.reason.fill('\0');
  std::copy_n(reason.begin(), std::min(reason.size(), head_.reason.size() - 1),
              head_.reason.begin());
  flush();
  if (files_.record.empty()) return {};
  try {
    write_at(create(files_.record), mapped_.get(), kBytes, 0);
  } catch (const std::system_error& error) {
    return "no flight record could be written to " + files_.record + ": " + error.what();
  }
  return "the last calls are in " + files_.record;
}

void FlightRecorder::close() noexcept {
  flush();
  trace_.reset();
  if (place_->is_open()) head_.closed = 1;
  place_->close();
}

// Appends the missing calls to the trace. A full disk ends the trace, not the run: the trace's head
// holds the number of its calls.
void FlightRecorder::flush() noexcept {
  if (!trace_) return;
  try {
    FlightRecorderHead head = head_;
    head.capacity = 0;
    while (traced_ < head_.begun) {
      const uint64_t most = std::min(kKept - traced_ % kKept, head_.begun - traced_);
      write_at(trace_, &slot(traced_), most * sizeof(CallRecord),
               static_cast<off_t>(kHeadBytes + traced_ * sizeof(CallRecord)));
      traced_ += most;
    }
    head.begun = traced_;
    std::array<std::byte, kHeadBytes> page{};
    std::memcpy(page.data(), &head, sizeof head);
    write_at(trace_, page.data(), page.size(), 0);
  } catch (const std::system_error&) {  // the previous head still describes the file
    trace_.reset();
  }
}

}  // namespace pycomm::observe
