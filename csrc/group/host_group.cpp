#include "group/host_group.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "group/check.h"
#include "shared/shared_call.h"

namespace pycomm {
namespace {

// Scratch of one call. A call that needs more runs in blocks. With 8 MiB of rings (mesh.cpp) and a
// segment of 1 MiB, a group uses less than 16 MiB per rank for any message size.
constexpr size_t kScratchBytes = size_t{6} << 20;
constexpr size_t kMaxPlans = 256;
// Longer than a round trip between two processors (about 1 us), but short, because spinning slows
// other processes: a small all_reduce of 2 ranks takes 5 to 8 us with a limit of 20, 50 or 200 us
// on an idle machine, but 110, 180 and 400 us beside a busy process (benchmarks/results/spin.json).
constexpr std::chrono::microseconds kSpin{20};

EngineOptions engine_options(const ConnectOptions& options, const Mesh& mesh,
                             PeerConnector* connector) {
  EngineOptions engine{.rank = options.rank,
                       .names = {},
                       .interrupted = options.interrupted,
                       .connector = connector};
  for (size_t i = 0; i < mesh.members.size(); ++i)
    engine.names.push_back(name_of(static_cast<int>(i), mesh.members[i]));
  const auto here = std::ranges::count(mesh.hosts, mesh.hosts[static_cast<size_t>(options.rank)]);
  // Spin only if each rank has a processor: otherwise spinning delays the awaited rank.
  if (here <= static_cast<long>(std::thread::hardware_concurrency())) engine.spin = kSpin;
  // Threads of one process fail together and need no heartbeat.
  const bool alone = std::ranges::all_of(mesh.members, [](const Member& member) {
    return member.transport == "self" || member.transport == "local";
  });
  if (!alone) engine.heartbeat = options.heartbeat;
  const int64_t mine = mesh.members[static_cast<size_t>(options.rank)].pid;
  for (const Member& member : mesh.members)  // ranks of one process end together
    engine.pids.push_back(member.visible && member.pid != mine ? member.pid : 0);
  return engine;
}

// The slowest transport decides: if one pair needs it, every rank has such a pair.
Thresholds thresholds_of(const Mesh& mesh) {
  const auto uses = [&](std::string_view name) {
    return std::ranges::count(mesh.members, name, &Member::transport) > 0;
  };
  const std::string_view by = uses("tcp") ? "tcp" : uses("shm") ? "shm" : "local";
  const auto found = std::ranges::find(mesh.tuned, by, &TunedThresholds::transport);
  return found == mesh.tuned.end() ? Thresholds{} : found->thresholds;
}

template <size_t kSize>
void put(std::array<char, kSize>& into, const std::string& text) {
  std::copy_n(text.begin(), std::min(text.size(), kSize - 1), into.begin());
}

FlightRecorderHead head_of(const ConnectOptions& options, const Mesh& mesh) {
  const auto me = static_cast<size_t>(options.rank);
  FlightRecorderHead head;
  head.steady_ns = nanoseconds_of(Clock::now());
  head.wall_ns =
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  head.id = mesh.id;
  head.pid = mesh.members[me].pid;
  head.rank = options.rank;
  head.size = options.size;
  put(head.name, options.name);
  put(head.host, mesh.members[me].host);
  put(head.host_id, mesh.hosts[me]);
  return head;
}

}  // namespace

HostGroup::HostGroup(ConnectOptions options, Mesh mesh, std::vector<int> ranks)
    : options_(std::move(options)),
      members_(mesh.members),
      ranks_(std::move(ranks)),
      connector_(std::move(mesh.connector)),
      engine_(std::move(mesh.channels), engine_options(options_, mesh, connector_.get())),
      recorder_(head_of(options_, mesh), options_.recorder),
      worker_(options_.interrupted) {
  thresholds_ = thresholds_of(mesh);
  options_.tuned = std::move(mesh.tuned);  // for split()
  const auto& hosts = mesh.hosts;
  const auto me = static_cast<size_t>(options_.rank);
  local_size_ = static_cast<int>(std::ranges::count(hosts, hosts[me]));
  local_rank_ =
      static_cast<int>(std::count(hosts.begin(), hosts.begin() + options_.rank, hosts[me]));
  std::vector<std::string> known;
  for (const std::string& host : hosts) {
    const auto found = std::ranges::find(known, host);
    hosts_.push_back(static_cast<int>(found - known.begin()));
    if (found == known.end()) known.push_back(host);
  }
  host_count_ = static_cast<int>(known.size());
  if (!mesh.memories.empty()) make_region(mesh.memories);
  if (!region_ || mesh.heaps.empty()) return;  // heaps exist on a single host only
  region_->set_heaps(std::move(mesh.heaps));
  heap_ = std::move(mesh.heap);
}

void HostGroup::make_region(const std::vector<std::shared_ptr<std::byte>>& memories) {
  std::vector<std::shared_ptr<Segment>> segments;
  std::vector<int> here;
  for (size_t i = 0; i < memories.size(); ++i) {
    if (memories[i] == nullptr) continue;
    segments.emplace_back(memories[i], reinterpret_cast<Segment*>(memories[i].get()));
    here.push_back(static_cast<int>(i));
  }
  if (here.size() > 1)
    region_ =
        std::make_unique<SharedMemoryRegion>(std::move(segments), std::move(here), local_rank_);
  if (host_count_ > 1) hierarchical_.emplace(engine_, region_.get());
}

HostGroup::~HostGroup() { close(); }

void HostGroup::check(const Call& call) const {
  if (call.agreement) return;  // the device group checked it
  check_call(call, options_.rank, options_.size);
  const bool shared = region_ && host_count_ == 1;
  if (call.algorithm == Algorithm::shared_memory && !shared && options_.size > 1)
    throw Unsupported(
        "the algorithm shared_memory requires all ranks on one host, with connections "
        "that share memory",
        {.op = std::string(name_of(call.operation)), .rank = options_.rank});
}

void HostGroup::run(const Call& call) {
  check(call);
  take_turn(call, [&](auto since) { execute(call, since); });
}

std::shared_ptr<Work> HostGroup::start(const Call& call,
                                       std::function<void(std::exception_ptr)> then) {
  check(call);
  return worker_.start([this, call] { execute(call, {}); }, std::move(then));
}

void HostGroup::exchange(std::span<const Call> calls) {
  std::vector<MessageRequest> posted;
  for (const Call& call : calls) {
    if (is_plan(call.operation) || call.agreement || call.peer == kAnySource)
      throw InvalidArgument(
          "exchange() accepts send and recv only, and each recv needs an explicit source rank",
          {.op = std::string(name_of(call.operation)), .rank = options_.rank});
    check(call);
    const size_t bytes = call.count * bytes_of(call.dtype);
    posted.push_back({.peer = call.peer,
                      .signature = signature_of(call, Algorithm::direct),
                      .sends = call.operation == Operation::send,
                      .out = {static_cast<const std::byte*>(call.input), bytes},
                      .into = {static_cast<std::byte*>(call.output), bytes}});
  }
  if (calls.empty()) return;
  take_turn(calls.front(), [&](auto since) {
    engine_.check_usable();
    execute(calls.front(), Algorithm::direct, since,
            [&](const Deadline& deadline) { engine_.exchange(posted, deadline); });
  });
}

// Peers made this call but it never ran here, so the group cannot continue.
void HostGroup::take_turn(const Call& call, const Worker::Timed& body) {
  try {
    worker_.run(body, [&] { return limit_of(call); });
  } catch (const Timeout& late) {
    const std::string op(name_of(call.operation));
    engine_.stop(op + ": " + late.what());
    throw Timeout(op + ": " + late.what(),
                  {.op = op,
                   .rank = options_.rank,
                   .elapsed_s = std::chrono::duration<double>(limit_of(call)).count()});
  }
}

std::chrono::nanoseconds HostGroup::limit_of(const Call& call) const {
  if (call.timeout.count() > 0) return call.timeout;
  const std::lock_guard lock(mutex_);
  return options_.timeout;
}

void HostGroup::execute(const Call& call, Clock::time_point since) {
  engine_.check_usable();  // before this rank publishes the call in shared memory
  const bool chosen = is_plan(call.operation) || call.agreement;
  const Algorithm algorithm = chosen ? algorithm_for(call) : Algorithm::direct;
  execute(call, algorithm, since,
          [&](const Deadline& deadline) { carry_out(call, algorithm, deadline); });
}

void HostGroup::execute(const Call& call, Algorithm algorithm, Clock::time_point since,
                        const Body& body) {
  std::unique_lock lock(mutex_);
  const Deadline deadline(since == Clock::time_point{} ? Clock::now() : since,
                          call.timeout.count() > 0 ? call.timeout : options_.timeout);
  recorder_.begin(record_of(call, engine_.next_header(signature_of(call, algorithm)), deadline));
  lock.unlock();
  try {
    body(deadline);
  } catch (const Error& error) {
    lock.lock();
    end_call(true);
    const std::string where = record_failure(error);
    if (where.empty()) throw;
    throw Error(error.kind(), error.what() + where, error.fields());
  } catch (...) {  // out of memory, or from Python
    lock.lock();
    end_call(true);
    throw;
  }
  lock.lock();
  const auto now = end_call(false);
  ++stats_.calls;
  stats_.seconds += std::chrono::duration<double>(now - deadline.start()).count();
}

void HostGroup::carry_out(const Call& call, Algorithm algorithm, const Deadline& deadline) {
  if (call.agreement && is_plan(call.operation)) return agree(call, deadline);
  const size_t bytes = call.agreement ? 0 : call.count * bytes_of(call.dtype);
  switch (call.operation) {
    case Operation::send:
      if (call.agreement)
        engine_.announce_send(call.peer, signature_of(call, algorithm), deadline);
      else
        engine_.send(call.peer, signature_of(call, algorithm),
                     {static_cast<const std::byte*>(call.input), bytes}, deadline);
      break;
    case Operation::recv: {
      const int source = engine_.receive(call.peer == kAnySource ? kAnyPeer : call.peer,
                                         signature_of(call, algorithm),
                                         {static_cast<std::byte*>(call.output), bytes}, deadline);
      if (call.source != nullptr) *call.source = source;
      break;
    }
    case Operation::all_reduce:
    case Operation::broadcast:
    case Operation::all_gather:
    case Operation::reduce_scatter:
    case Operation::barrier:
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
      if (algorithm == Algorithm::shared_memory)
        execute_shared(call, deadline);
      else
        execute_plan(call, algorithm, deadline);
      break;
  }
}

// Adds the call to stats_ and the flight recorder and returns its end. Requires mutex_.
Clock::time_point HostGroup::end_call(bool failed) {
  const EngineTraffic traffic = engine_.traffic();
  stats_.frames_sent = traffic.frames_sent;
  stats_.bytes_sent = traffic.payload_sent;
  stats_.bytes_written = traffic.bytes_written;
  stats_.bytes_received = traffic.bytes_received;
  if (region_) {
    stats_.bytes_sent += region_->bytes_sent;
    stats_.bytes_written += region_->bytes_sent;
    stats_.bytes_received += region_->bytes_received;
  }
  const auto now = Clock::now();
  recorder_.end({.now = now,
                 .bytes_written = stats_.bytes_written,
                 .bytes_received = stats_.bytes_received,
                 .waited = traffic.waited},
                failed);
  return now;
}

// Writes a flight record for an error and returns the text that the error adds about it. The error
// that breaks the group overwrites the record of an earlier Mismatch. Requires mutex_.
std::string HostGroup::record_failure(const Error& error) {
  const auto keep = [&](bool breaking) {
    const std::string said = recorder_.keep(error.what(), breaking);
    return said.empty() ? said : "; " + said;
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

Algorithm HostGroup::algorithm_for(const Call& call) const {
  if (options_.size == 1 && call.algorithm == Algorithm::shared_memory) return Algorithm::direct;
  if (call.algorithm != Algorithm::automatic) return call.algorithm;
  if (region_ && host_count_ == 1 && call.counts.empty()) return Algorithm::shared_memory;
  return choose({.operation = call.operation,
                 .dtype = call.dtype,
                 .op = call.op,
                 .size = options_.size,
                 .count = count_to_choose_by(call),
                 .reproducible = options_.reproducible,
                 .ragged = !call.counts.empty(),
                 .hosts = host_count_,
                 .thresholds = thresholds_});
}

void HostGroup::execute_shared(const Call& call, const Deadline& deadline) {
  SharedJob job{.operation = call.operation,
                .input = static_cast<const std::byte*>(call.input),
                .output = static_cast<std::byte*>(call.output),
                .count = call.count,
                .element_bytes = bytes_of(call.dtype),
                .root = call.peer};
  if (reduces(call.operation)) {
    job.reducer = &reducer(call.dtype, call.op);
    job.folds = is_half(call.dtype);
  }
  const Header header = engine_.next_header(signature_of(call, Algorithm::shared_memory));
  region_->begin(header);
  SharedCall run(engine_, *region_, job, header);
  engine_.run(run, header, deadline);
}

void HostGroup::execute_plan(const Call& call, Algorithm algorithm, const Deadline& deadline) {
  PlanJob job;
  job.signature = signature_of(call, algorithm);
  job.input = static_cast<const std::byte*>(call.input);
  job.output = static_cast<std::byte*>(call.output);
  job.element_bytes = bytes_of(call.dtype);
  job.size = options_.size;
  if (reduces(call.operation)) job.reducer = &reducer(call.dtype, call.op);
  if (hierarchical_ && algorithm == Algorithm::hierarchical &&
      call.operation == Operation::all_reduce)
    return hierarchical_->all_reduce(job, place(options_.rank, call, call.count), deadline);
  if (call.counts.empty()) return execute_blocks(call, job, deadline);
  if (call.operation == Operation::all_to_all) {
    if (options_.size > 1 && !call.counts_fit) check_splits(call, job.signature, deadline);
    job.peer_counts = call.counts;
  }
  // Counts change between calls: their plans are not cached.
  const Schedule schedule = schedule_of(call, algorithm, 0);
  job.schedule = &schedule;
  run_plan(job, deadline);
}

void HostGroup::run_plan(const PlanJob& job, const Deadline& deadline) {
  if (region_) region_->begin(engine_.next_header(job.signature));
  engine_.run(job, deadline);
}

void HostGroup::execute_blocks(const Call& call, PlanJob& job, const Deadline& deadline) {
  const auto algorithm = static_cast<Algorithm>(job.signature.algorithm);
  const size_t block = planned(call, algorithm, call.count).block;
  size_t begin = 0;
  do {
    const size_t count = std::min(block, call.count - begin);
    job.schedule = &planned(call, algorithm, count).schedule;
    if (call.operation == Operation::reduce_scatter && count < call.count) {
      job.piece = count;
      job.stride = call.count;
    }
    run_plan(job, deadline);
    begin += count;
    if (job.input != nullptr) job.input += count * job.element_bytes;
    if (job.output != nullptr) job.output += count * job.element_bytes;
  } while (begin < call.count);
}

CollectiveShape HostGroup::place(int rank, const Call& call, size_t count) const {
  return {.rank = rank,
          .size = options_.size,
          .count = count,
          .root = is_rooted(call.operation) ? call.peer : 0,
          .counts = call.counts,
          .hosts = hosts_};
}

// How many elements of a call run at a time, so that scratch stays within kScratchBytes. All ranks
// must compute the same number, so each considers the plans of all ranks, or of rank 0 only if they
// are alike. A reduce_scatter whose ranges span chunks cannot be cut into blocks and runs whole.
size_t HostGroup::block_of(const Call& call, Algorithm algorithm) const {
  const bool simple = algorithm == Algorithm::ring || algorithm == Algorithm::direct;
  if (!reduces(call.operation) || (call.operation == Operation::reduce_scatter && !simple))
    return call.count;
  const bool alike = call.operation != Operation::reduce &&
                     (simple || algorithm == Algorithm::owner || algorithm == Algorithm::tree);
  const auto scratch_of = [&](size_t block) {
    size_t most = 0;
    for (int rank = 0; rank < (alike ? 1 : options_.size); ++rank)
      most = std::max(most, make_plan(algorithm, call.operation, place(rank, call, block)).scratch);
    return most * bytes_of(call.dtype);
  };
  size_t block = call.count;
  for (;;) {
    const size_t scratch = scratch_of(block);
    if (scratch <= kScratchBytes || block <= 1) return block;
    block = std::max<size_t>(1, std::min(block - 1, block / (scratch / kScratchBytes + 1)));
  }
}

Schedule HostGroup::schedule_of(const Call& call, Algorithm algorithm, size_t count) const {
  return make_schedule(make_plan(algorithm, call.operation, place(options_.rank, call, count)),
                       options_.rank);
}

const HostGroup::Planned& HostGroup::planned(const Call& call, Algorithm algorithm, size_t count) {
  const auto key =
      std::tuple(call.operation, algorithm, count, is_rooted(call.operation) ? call.peer : 0);
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  if (plans_.size() >= kMaxPlans) plans_.clear();
  Call asked = call;
  asked.count = count;
  Planned made{schedule_of(call, algorithm, count), block_of(asked, algorithm)};
  return plans_.emplace(key, std::move(made)).first->second;
}

Stats HostGroup::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

Status HostGroup::status() const {
  EngineStatus now = engine_.status();
  Status status{.doing = std::move(now.current_call), .broken = std::move(now.broken), .peers = {}};
  for (PeerStatus& seen : now.peers)
    status.peers.push_back({.connected = seen.connected,
                            .departed = seen.left_reason.value_or(""),
                            .silent_s = seen.last_seen_s,
                            .doing = std::move(seen.current_call),
                            .bytes_written = seen.bytes_written,
                            .bytes_received = seen.bytes_received});
  status.peers.resize(static_cast<size_t>(options_.size));
  return status;
}

void HostGroup::set_timeout(std::chrono::nanoseconds timeout) {
  if (timeout.count() <= 0) throw InvalidArgument("invalid timeout: it must be longer than 0 s");
  const std::lock_guard lock(mutex_);
  options_.timeout = timeout;
}

void HostGroup::start_heartbeat() {
  if (engine_.heartbeat_interval().count() == 0) return;
  try {
    heartbeat_.start(engine_.heartbeat_interval(), [this] { return engine_.heartbeat(); });
  } catch (const Error& error) {  // peers would wait for a rank that sends no heartbeat
    engine_.fail(error);
    throw;
  }
}

void HostGroup::close() noexcept {
  if (worker_.busy()) engine_.stop("it was closed while a call ran");
  worker_.join();
  heartbeat_.join();
  engine_.leave();
  const std::lock_guard lock(mutex_);
  recorder_.close();
}

void HostGroup::hear(std::chrono::nanoseconds limit) {
  std::vector<int> others(static_cast<size_t>(options_.size));
  std::iota(others.begin(), others.end(), 0);
  std::erase(others, options_.rank);
  engine_.check_for_failures(limit, others);
}

void HostGroup::abort(const std::string& reason) noexcept {
  engine_.stop(reason);  // ends the running call and those queued after it
  worker_.run_exclusive([&] {
    const GroupBroken error("the group was aborted: " + reason);
    engine_.fail(error);
    const std::lock_guard lock(mutex_);
    (void)record_failure(error);
  });
  heartbeat_.join();
}

}  // namespace pycomm
