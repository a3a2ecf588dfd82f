// See info_exchange.h.
#include "group/info_exchange.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "bootstrap/mesh.h"
#include "bootstrap/rank_info.h"
#include "group/tcp_fallback.h"
#include "os/process.h"
#include "os/random.h"

namespace pycomm::group {
namespace {

// In a larger group, rank 0 reads all rank infos and stores them again in blocks of this many. A
// rank then reads a few values instead of `size`, and the store serves far fewer than size x size
// reads.
constexpr int kInfosPerBlock = 64;
// Kept for finding out which ranks are missing, if the blocks do not appear in time.
constexpr std::chrono::seconds kNamingTime{1};

// A responsive store reports within this time after the deadline which ranks are missing.
constexpr std::chrono::milliseconds kLastAnswerTime{200};

// After a process that serves the store closed its connections: until it has ended.
constexpr std::chrono::milliseconds kEndTime{100}, kEndPause{1};

// How long rank 0, which may serve the store, waits until the others read why the group failed.
// They look every kPollInterval.
constexpr std::chrono::milliseconds kFailureReadTime{500};

std::string key_of_info(const std::string& keys, int rank) {
  return keys + "/rank_info/" + std::to_string(rank);
}

std::string key_of_block(const std::string& keys, int block) {
  return keys + "/rank_infos/" + std::to_string(block);
}

std::string seconds_text(double seconds) {
  std::ostringstream text;
  text.precision(3);
  text << seconds;
  return text.str();
}

// Why a group does not form, as the first rank that knew it wrote into the store. All ranks report
// this cause: what each of them sees of it depends on the order in which the others leave.
struct Failure {
  std::string id;            // unique: distinguishes it from those of earlier attempts
  std::vector<int> ranks{};  // that did not join, or the one that died
  std::string death{};       // how that one died; empty if ranks did not join
  bool no_answer = false;    // of the store; so the others do not read this
};

std::string encode(const Failure& failure) {
  std::string text = failure.id + "\n";
  for (const int rank : failure.ranks)
    text += (rank == failure.ranks[0] ? "" : " ") + std::to_string(rank);
  return text + "\n" + failure.death;
}

// Nothing if another program wrote the value.
std::optional<Failure> decode_failure(const std::string& text, const ConnectOptions& options) {
  std::istringstream lines(text);
  Failure failure;
  std::string ranks, word;
  std::getline(lines, failure.id);
  std::getline(lines, ranks);
  std::getline(lines, failure.death);
  for (std::istringstream words(ranks); words >> word;) {
    int rank = -1;
    (void)std::from_chars(word.data(), word.data() + word.size(), rank);
    if (rank < 0 || rank >= options.size || rank == options.rank) return std::nullopt;
    failure.ranks.push_back(rank);
  }
  if (failure.id.empty() || failure.ranks.empty()) return std::nullopt;
  return failure;
}

// " (rank 3 of the default group)" where the parent of a later group counts otherwise.
std::string place_in_parent(int rank, const ConnectOptions& options) {
  if (options.parent_ranks.empty()) return {};
  const int there = options.parent_ranks[static_cast<size_t>(rank)];
  return there == rank ? "" : " (rank " + std::to_string(there) + " of the default group)";
}

[[noreturn]] void throw_failure(const Failure& failure, const ConnectOptions& options,
                                const Deadline& deadline) {
  const std::string group = "the group \"" + options.name + "\" did not form";
  const ErrorFields fields{.op = "init",
                           .rank = options.rank,
                           .peer = failure.ranks.size() == 1 ? failure.ranks[0] : -1,
                           .elapsed_s = deadline.elapsed_s()};
  if (!failure.death.empty()) throw PeerLost(group + ": " + failure.death, fields);
  const double passed = deadline.expired() ? deadline.limit_s() : deadline.elapsed_s();
  std::string text = group + " in " + seconds_text(passed) + " s";
  if (failure.no_answer)
    text +=
        ": the rendezvous store does not answer: the process that serves it is stopped or "
        "unreachable";
  if (!failure.ranks.empty())
    text += ": of " + std::to_string(options.size) + " ranks these did not join: ";
  for (const int rank : failure.ranks)
    text += (rank == failure.ranks[0] ? "" : ", ") + std::to_string(rank) +
            place_in_parent(rank, options);
  throw Timeout(text, fields);
}

// How many missing rank infos are looked up in each slice of the wait.
constexpr int kLooksPerSlice = 8;
constexpr std::chrono::milliseconds kLookTime{100};

// Exchanges the rank infos of a group through the store, and rank 0's key if the store has to
// transmit it. While ranks are missing, it watches the processes of the others.
class InfoExchange {
 public:
  InfoExchange(rendezvous::Store& store, const ConnectOptions& options, const std::string& keys,
               const Deadline& deadline)
      : store_(store),
        options_(options),
        keys_(keys),
        deadline_(deadline),
        known_(static_cast<size_t>(options.size)),
        next_(options.rank) {}

  // The infos of all ranks. Throws why the group does not form, the same on all ranks.
  std::vector<std::string> run(const std::string& mine) {
    try {
      return read(mine);
    } catch (const Error& error) {  // of the store, unless this rank knew why the group fails
      if (failed_) throw;
      if (error.kind() == ErrorKind::timeout) fail_alone();
      if (error.kind() == ErrorKind::peer_lost) check_known(kEndTime);  // the store's, perhaps
      throw;
    }
  }

  // The key, after run().
  std::string secret() const {
    return options_.secret.empty() ? *values_.at(key_of_secret(keys_)) : options_.secret;
  }

 private:
  std::vector<std::string> read(const std::string& mine) {
    mine_ = bootstrap::decode_rank_info(mine);
    for (int rank = 0; rank < options_.size; ++rank) values_[key_of_info(keys_, rank)];
    own_ = mine;
    if (options_.secret.empty()) values_[key_of_secret(keys_)];
    if (options_.size <= kInfosPerBlock) return read_all();
    publish();
    if (options_.rank == 0) {
      auto infos = read_all();
      publish_blocks(infos);
      return infos;
    }
    const auto margin = std::min<std::chrono::nanoseconds>(kNamingTime, deadline_.left() / 10);
    if (auto infos = read_blocks(Deadline(deadline_.left() - margin))) return *infos;
    return read_all();  // a rank or rank 0 itself is missing: find out which
  }

  std::string own_key() const { return key_of_info(keys_, options_.rank); }

  void publish() {
    if (!std::exchange(published_, true)) store_.set(own_key(), own_, deadline_);
  }

  std::vector<std::string> read_all() {
    if (!wait_for(values_, deadline_)) find_missing();
    std::vector<std::string> infos;
    for (int rank = 0; rank < options_.size; ++rank)
      infos.push_back(*values_.at(key_of_info(keys_, rank)));
    return infos;
  }

  // Fetches the missing values; false at `deadline`.
  bool wait_for(rendezvous::Store::Values& values, const Deadline& deadline) {
    for (;;) {
      const bool last = deadline.left() <= kPollInterval;
      try {
        const Deadline slice = last ? deadline : Deadline(kPollInterval);
        if (published_)
          store_.get_missing(values, slice);
        else
          store_.exchange(own_key(), own_, values, slice);
        return true;
      } catch (const Timeout&) {  // the end of a slice
        if (last) return false;
      }
      publish();
      check_failure();
      check_known(std::chrono::milliseconds{0});
      if (&values == &values_) check_processes();
      if (options_.interrupted && options_.interrupted())
        throw GroupBroken("waiting for the ranks of \"" + options_.name + "\" was interrupted");
    }
  }

  // At the deadline. Returns if the last rank joined meanwhile.
  void find_missing() {
    const Deadline answered(kLastAnswerTime);
    std::vector<int> missing;
    for (int rank = 0; rank < options_.size; ++rank) {
      auto& value = values_.at(key_of_info(keys_, rank));
      if (!value) value = look_up(key_of_info(keys_, rank));
      if (!value) missing.push_back(rank);
      if (answered.expired()) fail_alone();
    }
    if (!missing.empty()) fail({.id = os::random_name(), .ranks = missing});
    for (auto& [key, value] : values_) {
      if (!value) value = look_up(key);
      failed_ = !value;
      if (failed_)
        throw Timeout("the group \"" + options_.name +
                          "\" did not form: rank 0 has PYCOMM_SECRET, and this rank has none",
                      {.op = "init", .rank = options_.rank, .peer = 0});
    }
  }

  // The store does not answer: names ranks only if it is not needed for knowing them.
  [[noreturn]] void fail_alone() {
    failed_ = true;
    Failure failure{.id = {}, .no_answer = true};
    for (int rank = 0; rank < options_.size && store_.shows_all(); ++rank)
      if (!values_.at(key_of_info(keys_, rank))) failure.ranks.push_back(rank);
    throw_failure(failure, options_, deadline_);
  }

  // Of a later group, the ranks that have not joined: whether a process ends within the limit. One
  // descriptor at a time: a large group has few left.
  void check_known(std::chrono::milliseconds limit) {
    for (const Deadline deadline(limit);;) {
      for (size_t i = 0; i < options_.known.size(); ++i) {
        const auto rank = static_cast<int>(i);
        const Member& member = options_.known[i];
        const bool other = member.visible && member.pid != mine_.pid;
        if (!other || values_.at(key_of_info(keys_, rank)) || !os::Process(member.pid).look())
          continue;
        fail({.id = os::random_name(),
              .ranks = {rank},
              .death = bootstrap::name_of(rank, member) + place_in_parent(rank, options_) +
                       " died before it joined: its process has ended"});
      }
      if (deadline.expired()) return;
      std::this_thread::sleep_for(kEndPause);  // there is no descriptor for the end of any of them
    }
  }

  // Looks up some of the missing infos and watches the processes of the others. A rank that fails
  // in an orderly way removes its info first, and counts as missing.
  void check_processes() {
    const Deadline answered(kLookTime);  // bounds all lookups in a slow store
    for (int i = 0; i < std::min(kLooksPerSlice, options_.size) && !answered.expired(); ++i) {
      next_ = (next_ + 1) % options_.size;
      auto& value = values_.at(key_of_info(keys_, next_));
      if (!value) value = look_up(key_of_info(keys_, next_));
    }
    for (int rank = 0; rank < options_.size; ++rank) {
      const auto& value = values_.at(key_of_info(keys_, rank));
      auto& known = known_[static_cast<size_t>(rank)];
      if (!value || rank == options_.rank) continue;
      if (!known) known.emplace(process_of(*value));
      if (known->first.options != mine_.options) throw_different(rank, known->first);
      if (!known->second.look() || !look_up(key_of_info(keys_, rank))) continue;
      const bootstrap::RankInfo& info = known->first;
      fail({.id = os::random_name(),
            .ranks = {rank},
            .death =
                bootstrap::name_of(rank, {.host = info.host, .pid = info.pid, .transport = {}}) +
                " died while the group formed: its process has ended"});
    }
  }

  // Without waiting for the ranks that are missing: this rank may wait for one that others do not
  // know.
  [[noreturn]] void throw_different(int rank, const bootstrap::RankInfo& info) const {
    throw Mismatch("ranks were started with different options: rank " +
                       std::to_string(options_.rank) + " has " + mine_.options + ", rank " +
                       std::to_string(rank) + " has " + info.options,
                   {.op = "init", .rank = options_.rank, .peer = rank});
  }

  // Opens a rank's process if it is visible from this one.
  std::pair<bootstrap::RankInfo, os::Process> process_of(const std::string& text) const {
    const bootstrap::RankInfo info = bootstrap::decode_rank_info(text);
    const bool visible =
        bootstrap::on_one_machine(info, mine_) && info.pid_space == mine_.pid_space;
    return {info, os::Process(visible && info.pid != mine_.pid ? info.pid : 0)};
  }

  // Reports the failure that another rank stored. One that is in the store when this rank looks
  // first is that of an earlier attempt.
  void check_failure() {
    const auto text = look_up(keys_ + "/failed");
    if (!looked_) earlier_ = text;
    looked_ = true;
    if (!text || text == earlier_) return;
    if (const auto failure = decode_failure(*text, options_)) report(*failure);
  }

  // Stores why the group does not form, unless another rank did so before, and reports it.
  [[noreturn]] void fail(const Failure& failure) {
    const std::string key = keys_ + "/failed", mine = encode(failure);
    const Deadline limit(kCleanUpTime);
    std::string first = mine;
    try {
      first = store_.claim(key, mine, limit);
      if (first == earlier_) store_.set(key, first = mine, limit);
    } catch (const Timeout&) {  // perhaps it did not answer what was asked before, either
      if (failure.death.empty() && !store_.shows_all()) fail_alone();
    } catch (const Error&) {  // the store ended: this rank reports what it saw
    }
    report(decode_failure(first, options_).value_or(failure));
  }

  [[noreturn]] void report(const Failure& failure) {
    failed_ = true;
    const std::string readers = keys_ + "/failed/" + failure.id;
    try {
      const Deadline limit(options_.rank == 0 ? kFailureReadTime : kCleanUpTime);
      const auto present = options_.size - static_cast<int64_t>(failure.ranks.size());
      int64_t read = store_.add(readers, 1, limit);
      if (options_.rank == 0 && read < present) {
        rendezvous::Store::Values all{{readers + "/all", std::nullopt}};
        store_.get_missing(all, limit);
      } else if (read >= present) {
        store_.set(readers + "/all", "1", limit);
      }
    } catch (const Error&) {  // the others end at their own limits
    }
    throw_failure(failure, options_, deadline_);
  }

  std::optional<std::string> look_up(const std::string& key) {
    try {
      return store_.get(key, Deadline(std::chrono::nanoseconds{0}));
    } catch (const Timeout&) {
      return std::nullopt;
    }
  }

  void publish_blocks(const std::vector<std::string>& infos) {
    for (size_t begin = 0; begin < infos.size(); begin += kInfosPerBlock) {
      std::string block;
      for (size_t i = begin; i < std::min(begin + kInfosPerBlock, infos.size()); ++i)
        block += std::to_string(infos[i].size()) + "\n" + infos[i];
      store_.set(key_of_block(keys_, static_cast<int>(begin / kInfosPerBlock)), block, deadline_);
    }
  }

  // Nothing at the deadline.
  std::optional<std::vector<std::string>> read_blocks(const Deadline& deadline) {
    rendezvous::Store::Values blocks;
    for (int i = 0; i < options_.size; i += kInfosPerBlock)
      blocks[key_of_block(keys_, i / kInfosPerBlock)];
    if (options_.secret.empty()) blocks[key_of_secret(keys_)];
    if (!wait_for(blocks, deadline)) return std::nullopt;
    if (options_.secret.empty()) values_[key_of_secret(keys_)] = blocks[key_of_secret(keys_)];
    std::vector<std::string> infos;
    for (int i = 0; i < options_.size; i += kInfosPerBlock) {
      const std::string& text = *blocks[key_of_block(keys_, i / kInfosPerBlock)];
      for (size_t begin = 0; begin < text.size();) {
        size_t bytes = 0;
        const char* end = text.data() + text.size();
        const auto parsed = std::from_chars(text.data() + begin, end, bytes);
        begin = static_cast<size_t>(parsed.ptr - text.data()) + 1;
        check(parsed.ec == std::errc{} && begin <= text.size() && bytes <= text.size() - begin,
              "invalid block of rank infos in the store: it is truncated");
        infos.push_back(text.substr(begin, bytes));
        begin += bytes;
      }
    }
    check(infos.size() == static_cast<size_t>(options_.size),
          "invalid blocks of rank infos in the store: some are missing");
    return infos;
  }

  rendezvous::Store& store_;
  const ConnectOptions& options_;
  const std::string& keys_;
  const Deadline& deadline_;
  std::string own_;  // the info of this rank; it is read back, as all compare what is stored
  bootstrap::RankInfo mine_;
  rendezvous::Store::Values values_;
  std::vector<std::optional<std::pair<bootstrap::RankInfo, os::Process>>> known_;  // by rank
  int next_;                            // the rank that was looked up last
  bool published_ = false;              // certainly
  bool looked_ = false;                 // whether the store was searched for a failure
  std::optional<std::string> earlier_;  // the failure of an earlier attempt
  bool failed_ = false;                 // this attempt
};

}  // namespace

std::string key_of_secret(const std::string& keys) { return keys + "/key"; }

Exchanged exchange_infos(rendezvous::Store& store, const ConnectOptions& options,
                         const std::string& keys, const std::string& mine,
                         const Deadline& deadline) {
  InfoExchange exchange(store, options, keys, deadline);
  auto infos = exchange.run(mine);
  return {.infos = std::move(infos), .secret = exchange.secret()};
}

void remove_infos(rendezvous::Store& store, const ConnectOptions& options, const std::string& keys,
                  const Deadline& deadline) {
  store.remove(key_of_info(keys, options.rank), deadline);
  for (int i = 0; options.rank == 0 && options.size > kInfosPerBlock && i < options.size;
       i += kInfosPerBlock)
    store.remove(key_of_block(keys, i / kInfosPerBlock), deadline);
}

}  // namespace pycomm::group
