#include "weak_memory.h"

#include <memory>
#include <vector>

#include "emulator/fiber.hpp"
#include "harness.h"

namespace weak {
namespace {

// Between two messages there is space for others: 2^40 for the first.
constexpr uint64_t kStep = uint64_t{1} << 40;
constexpr size_t kMostMessages = 64;  // of a location

struct Message {
  uint64_t at = 0;      // in modification order
  uint64_t number = 0;  // in the order of execution
  uint64_t value = 0;
  View view;              // what an acquiring reader sees
  bool followed = false;  // by a read-modify-write, which nothing may precede
};

struct Location {
  std::vector<Message> history;
  uint64_t sequential = 0;  // the last sequentially consistent store
  int wakes = 0;            // of a socket
};

enum class Kind { begin, load, store, fence, wait, wake };

// The next operation of a thread.
struct Next {
  Kind kind = Kind::begin;
  int location = -1;
  bool sequential = false;
};

struct Thread {
  emulator::Fiber fiber;
  View view, pending, released;  // pending: by relaxed loads, for an acquire fence
  Next next;
  int last = -1;               // location of the last load
  uint64_t last_at = 0;        // its message
  size_t blocked_at = 0;       // after retry(): messages of `last` then; 0: not blocked
  uint64_t blocked_since = 0;  // number of the first message after that
  bool finished = false;

  explicit Thread(void (*entry)()) : fiber(entry) {}
  void begin(const View& constructed, size_t index) {
    view = released = constructed;
    view.clock[index] = 1;
    pending = {};
    next = {};
    last = -1;
    last_at = blocked_at = 0;
    finished = false;
  }
};

struct Abandoned {};  // thrown on a fiber: ends its execution

// Which continuations of each thread's next operation were explored before: sleep sets. An asleep
// thread need not run. After a store by another thread, a load need return only the new messages.
struct Explored {
  std::array<bool, kMostThreads> asleep{};
  std::array<uint64_t, kMostThreads>
      since{};  // number of the first message that is new; 0: all are
};

// A point where an execution may continue in several ways.
struct Choice {
  std::vector<int> options;
  size_t at = 0;
  Explored explored;
};

class Explorer {
 public:
  explicit Explorer(bool all) : all_(all) {}
  Result run(int threads, const std::function<Scenario*()>& make, uint64_t most);

  // Of the fiber that runs.
  void announce(Next next) {
    require(thread().blocked_at == 0 || next.location == thread().last,
            "after retry() a thread loads the same location");
    thread().next = next;
    scheduler_.run(thread().fiber);
    if (abandoned_) throw Abandoned();
  }
  Thread& thread() { return *threads_[static_cast<size_t>(running_)]; }
  View& view() { return running_ < 0 ? constructed_ : thread().view; }
  Location& location(int i) { return locations_[static_cast<size_t>(i)]; }
  size_t choose(size_t count);
  // The messages that a load of this thread need return begin at this number.
  uint64_t new_since() const { return running_ < 0 ? 0 : new_since_; }
  void fault(const std::string& what);
  void enter();
  [[noreturn]] void abandon() {
    abandoned_ = true;
    throw Abandoned();
  }

  std::vector<Location> locations_;
  View constructed_, fences_;
  int running_ = -1;
  uint64_t messages_ = 0;

 private:
  bool execute(int threads, const std::function<Scenario*()>& make);
  bool enabled(int i) const;
  bool step();
  bool backtrack();
  void resume(int i) {
    running_ = i;
    threads_[static_cast<size_t>(i)]->fiber.run(scheduler_);
    running_ = -1;
  }

  const bool all_;
  emulator::Fiber scheduler_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::unique_ptr<Scenario> scenario_;
  std::vector<Choice> trail_;
  size_t depth_ = 0;
  Explored explored_;
  uint64_t new_since_ = 0;
  bool abandoned_ = false;
  std::string fault_;
};

Explorer* current = nullptr;

bool is_acquire(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}
bool is_release(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}
bool is_sequential(std::memory_order order) { return order == std::memory_order_seq_cst; }

bool independent(const Next& a, const Next& b) {
  if (a.kind == Kind::begin || b.kind == Kind::begin) return false;
  const bool fence = a.kind == Kind::fence || b.kind == Kind::fence;
  if (fence && a.sequential && b.sequential) return false;
  if (fence || a.location != b.location) return true;
  return a.kind == Kind::load && b.kind == Kind::load;
}

size_t Explorer::choose(size_t count) {
  if (count == 1 || running_ < 0) return 0;
  if (depth_ == trail_.size()) {
    Choice choice;
    for (size_t i = 0; i < count; ++i) choice.options.push_back(static_cast<int>(i));
    trail_.push_back(choice);
  }
  const Choice& choice = trail_[depth_++];
  return static_cast<size_t>(choice.options[choice.at]);
}

void Explorer::fault(const std::string& what) {
  if (fault_.empty()) fault_ = what;
  abandon();
}

void Explorer::enter() {
  emulator::Fiber::arrived(scheduler_);
  for (;;) {
    try {
      scenario_->run(running_);
    } catch (const Abandoned&) {  // the fiber begins the next execution
    }
    thread().finished = true;
    scheduler_.run(thread().fiber);
  }
}

bool Explorer::enabled(int i) const {
  const Thread& thread = *threads_[static_cast<size_t>(i)];
  if (thread.finished) return false;
  if (thread.next.location < 0) return true;
  const Location& location = locations_[static_cast<size_t>(thread.next.location)];
  if (thread.next.kind == Kind::wait) return location.wakes > 0;
  return thread.blocked_at == 0 || location.history.size() > thread.blocked_at;
}

// Runs one operation of one thread. False: the execution ends here.
bool Explorer::step() {
  const int count = static_cast<int>(threads_.size());
  if (depth_ == trail_.size()) {
    Choice choice;
    bool any = false, waiting = false;
    for (int i = 0; i < count; ++i) {
      waiting |= !threads_[static_cast<size_t>(i)]->finished;
      if (!enabled(i)) continue;
      any = true;
      if (!explored_.asleep[static_cast<size_t>(i)]) choice.options.push_back(i);
    }
    if (!any && waiting) fault_ = "a thread waits forever";
    if (!any) return false;
    if (choice.options.empty()) {
      abandoned_ = true;
      return false;
    }
    choice.explored = explored_;
    trail_.push_back(choice);
  }
  const Choice& choice = trail_[depth_++];
  const int chosen = choice.options[choice.at];
  explored_ = choice.explored;
  for (size_t i = 0; i < choice.at && !all_; ++i) {
    const auto before = static_cast<size_t>(choice.options[i]);
    explored_.asleep[before] = true;
    explored_.since[before] = messages_ + 1;
  }
  Thread& thread = *threads_[static_cast<size_t>(chosen)];
  new_since_ = explored_.since[static_cast<size_t>(chosen)];
  if (thread.blocked_at != 0) new_since_ = std::max(new_since_, thread.blocked_since);
  for (size_t i = 0; i < threads_.size(); ++i) {
    const Next& other = threads_[i]->next;
    if (independent(other, thread.next)) continue;
    explored_.asleep[i] = false;
    if (other.kind != Kind::load || thread.next.kind != Kind::store) explored_.since[i] = 0;
  }
  explored_.since[static_cast<size_t>(chosen)] = 0;
  explored_.asleep[static_cast<size_t>(chosen)] = false;
  thread.blocked_at = 0;
  resume(chosen);
  return !abandoned_;
}

bool Explorer::execute(int threads, const std::function<Scenario*()>& make) {
  locations_.clear();
  constructed_ = fences_ = {};
  constructed_.clock[kMostThreads] = 1;
  running_ = -1;
  depth_ = 0;
  explored_ = {};
  messages_ = 0;
  abandoned_ = false;
  scenario_.reset(make());
  threads_.resize(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    auto& thread = threads_[static_cast<size_t>(i)];
    if (thread == nullptr) thread = std::make_unique<Thread>([] { current->enter(); });
    thread->begin(constructed_, static_cast<size_t>(i));
  }
  // Up to the first operation a thread depends on nothing.
  for (int i = 0; i < threads && !abandoned_; ++i) resume(i);
  while (!abandoned_ && step()) {
  }
  abandoned_ |= !fault_.empty();
  if (abandoned_) {
    for (int i = 0; i < threads; ++i)
      if (!threads_[static_cast<size_t>(i)]->finished) resume(i);
    return false;
  }
  for (const auto& thread : threads_) constructed_.join(thread->view);
  try {
    scenario_->end();
  } catch (const Failure& failure) {
    fault_ = failure.what();
  }
  return true;
}

bool Explorer::backtrack() {
  while (!trail_.empty() && ++trail_.back().at == trail_.back().options.size()) trail_.pop_back();
  return !trail_.empty();
}

Result Explorer::run(int threads, const std::function<Scenario*()>& make, uint64_t most) {
  current = this;
  Result result;
  do {
    execute(threads, make) ? ++result.executions : ++result.pruned;
    expect(result.executions <= most, "the scenario has too many executions");
  } while (fault_.empty() && backtrack());
  result.fault = fault_;
  threads_.clear();
  scenario_.reset();
  current = nullptr;
  return result;
}

// The messages that a load may return, as indices; `lowest`: of the view.
uint64_t lowest(int location, bool sequential) {
  const auto i = static_cast<size_t>(location);
  uint64_t at = current->view().messages[i];
  if (sequential)
    at = std::max({at, current->location(location).sequential, current->fences_.messages[i]});
  return at;
}

size_t first_readable(const Location& location, uint64_t at) {
  size_t i = location.history.size();
  while (i > 0 && location.history[i - 1].at >= at) --i;
  return i;
}

void see(int location, const Message& message, std::memory_order order) {
  View& view = current->view();
  view.messages[static_cast<size_t>(location)] =
      std::max(view.messages[static_cast<size_t>(location)], message.at);
  if (is_acquire(order)) view.join(message.view);
  if (current->running_ >= 0) {
    current->thread().pending.join(message.view);
    current->thread().last = location;
    current->thread().last_at = message.at;
  }
}

// Inserts a message after the one at index `after`. `base`: of a release sequence, or null.
void insert(int location, size_t after, uint64_t value, std::memory_order order, const View* base) {
  Location& here = current->location(location);
  const bool last = after + 1 == here.history.size();
  const uint64_t before = here.history[after].at;
  Message message;
  message.number = ++current->messages_;
  message.at = last ? before + kStep : before + (here.history[after + 1].at - before) / 2;
  message.value = value;
  View& view = current->view();
  view.messages[static_cast<size_t>(location)] = message.at;
  if (is_release(order))
    message.view = view;
  else if (current->running_ >= 0)
    message.view = current->thread().released;
  message.view.messages[static_cast<size_t>(location)] = message.at;
  if (base != nullptr) message.view.join(*base);
  if (is_sequential(order)) here.sequential = std::max(here.sequential, message.at);
  expect(here.history.size() < kMostMessages, "too many messages");
  here.history.insert(here.history.begin() + static_cast<std::ptrdiff_t>(after) + 1, message);
  if (is_release(order) && current->running_ >= 0)
    ++view.clock[static_cast<size_t>(current->running_)];
}

void announce(Kind kind, int location, bool sequential) {
  if (current->running_ >= 0) current->announce({kind, location, sequential});
}

size_t thread_index() {
  return current->running_ < 0 ? kMostThreads : static_cast<size_t>(current->running_);
}

}  // namespace

void View::join_messages(const View& other) {
  for (size_t i = 0; i < messages.size(); ++i)
    messages[i] = std::max(messages[i], other.messages[i]);
}

void View::join(const View& other) {
  join_messages(other);
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other.clock[i]);
}

int add_location(uint64_t value) {
  expect(current->locations_.size() < kMostLocations, "too many locations");
  Location location;
  location.history.push_back({.at = kStep, .value = value, .view = {}, .followed = false});
  current->locations_.push_back(location);
  return static_cast<int>(current->locations_.size()) - 1;
}

uint64_t load(int location, std::memory_order order) {
  announce(Kind::load, location, is_sequential(order));
  const Location& here = current->location(location);
  const uint64_t since = current->new_since();
  std::array<size_t, kMostMessages> readable;
  size_t count = 0;
  for (size_t i = here.history.size();
       i-- > first_readable(here, lowest(location, is_sequential(order)));)
    if (here.history[i].number >= since) readable[count++] = i;
  if (count == 0) current->abandon();
  const Message& message = here.history[readable[current->choose(count)]];
  see(location, message, order);
  return message.value;
}

void store(int location, uint64_t value, std::memory_order order) {
  announce(Kind::store, location, is_sequential(order));
  const Location& here = current->location(location);
  std::vector<size_t> places;
  for (size_t i = here.history.size();
       i-- > first_readable(here, lowest(location, is_sequential(order)));)
    if (!here.history[i].followed) places.push_back(i);
  insert(location, places[current->choose(places.size())], value, order, nullptr);
}

uint64_t change(int location, std::memory_order order,
                const std::function<bool(uint64_t& value)>& how) {
  announce(Kind::store, location, is_sequential(order));
  Location& here = current->location(location);
  // A failed comparison may return any readable message; a change follows one that none follows.
  std::vector<size_t> places;
  for (size_t i = here.history.size();
       i-- > first_readable(here, lowest(location, is_sequential(order)));) {
    uint64_t value = here.history[i].value;
    if (!here.history[i].followed || !how(value)) places.push_back(i);
  }
  const size_t chosen = places[current->choose(places.size())];
  const Message read = here.history[chosen];
  see(location, read, order);
  uint64_t value = read.value;
  if (how(value)) {
    here.history[chosen].followed = true;
    insert(location, chosen, value, order, &read.view);
  }
  return read.value;
}

void Atomics::store_load_fence() {
  announce(Kind::fence, -1, true);
  Thread& thread = current->thread();
  thread.view.join(thread.pending);
  for (size_t i = 0; i < current->locations_.size(); ++i) {
    uint64_t& at = thread.view.messages[i];
    at = std::max({at, current->fences_.messages[i], current->locations_[i].sequential});
  }
  current->fences_.join_messages(thread.view);
  thread.released = thread.view;
  ++thread.view.clock[thread_index()];
}

void Atomics::release_fence() {
  announce(Kind::fence, -1, false);
  Thread& thread = current->thread();
  thread.released = thread.view;
  ++thread.view.clock[thread_index()];
}

void read(Accesses& accesses) {
  const View& view = current->view();
  for (size_t i = 0; i <= kMostThreads; ++i)
    require(accesses.writes.clock[i] <= view.clock[i], "a read races with a write");
  accesses.reads.clock[thread_index()] = view.clock[thread_index()];
}

void write(Accesses& accesses) {
  const View& view = current->view();
  for (size_t i = 0; i <= kMostThreads; ++i) {
    require(accesses.writes.clock[i] <= view.clock[i], "a write races with a write");
    require(accesses.reads.clock[i] <= view.clock[i], "a write races with a read");
  }
  accesses.writes.clock[thread_index()] = view.clock[thread_index()];
}

void require(bool holds, const char* what) {
  if (holds) return;
  if (current->running_ < 0) throw Failure(what);
  current->fault(what);
}

void retry() {
  Thread& thread = current->thread();
  const Location& location = current->location(thread.last);
  // Another execution is the same without this load.
  if (thread.last_at != location.history.back().at) current->abandon();
  thread.blocked_at = location.history.size();
  thread.blocked_since = current->messages_ + 1;
}

Socket::Socket() : location_(add_location(0)) {}

void Socket::wake() {
  announce(Kind::wake, location_, false);
  ++current->location(location_).wakes;
}

void Socket::wait() {
  announce(Kind::wait, location_, false);
  current->location(location_).wakes = 0;
}

Result explore(int threads, const std::function<Scenario*()>& make, uint64_t most, bool all) {
  expect(threads <= kMostThreads, "too many threads");
  Explorer explorer(all);
  return explorer.run(threads, make, most);
}

}  // namespace weak
