// See store_client.h.
#include "rendezvous/store_client.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>
#include <utility>

#include "core/errors.h"
#include "os/random.h"
#include "rendezvous/local_store.h"

namespace pycomm::rendezvous {

using store_frame::Reply;
using store_frame::Request;
using store_frame::Status;
using store_frame::Verb;

namespace {

// Maximum delay of a healthy server's reply `absent` after the requested wait.
constexpr std::chrono::milliseconds kAnswerSlack{300};
// A get repeats its request after this time, so that other calls can use the connection.
constexpr std::chrono::milliseconds kLongestWait{100};
// A connection without an answer for this time, doubled each time, is replaced: a firewall or load
// balancer that dropped the flow discards what is sent on it.
constexpr std::chrono::seconds kSilence{3};
// Maximum connections that one call may lose in a row.
constexpr int kMostLost = 5;

uint64_t random_number() {
  const auto bytes = os::random_bytes();
  uint64_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

std::string address_text(const std::string& host, uint16_t port) {
  const bool ipv6 = host.find(':') != std::string::npos;
  return (ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

[[noreturn]] void throw_unchanged(const std::string& key, const Deadline& deadline,
                                  const std::string& server) {
  ErrorFields fields;
  fields.elapsed_s = deadline.elapsed_s();
  std::ostringstream text;
  text.precision(3);
  text << "the store at " << server << " did not change the key '" << key << "' within "
       << deadline.limit_s()
       << " s: the process that serves it (rank 0) is stopped or cannot be reached";
  throw Timeout(text.str(), fields);
}

}  // namespace

StoreClient::StoreClient(const std::string& host, uint16_t port, const std::string& key,
                         const Deadline& deadline, StoreHooks hooks)
    : TcpStore(port),
      wait_(address_text(host, port), std::move(hooks.interrupted)),
      dialer_(host, port, key, wait_, std::move(hooks.log)),
      pool_(dialer_, wait_),
      client_(random_number()) {
  pool_.give_back(pool_.take(deadline));
}

StoreClient::InFlight::InFlight(StoreClient& client, Request& request) : client_(client) {
  const std::lock_guard lock(client.mutex_);
  request.client = client.client_;
  request.number = number_ = client.next_++;
  client.in_flight_.insert(number_);
  request.oldest = *client.in_flight_.begin();
}

StoreClient::InFlight::~InFlight() {
  const std::lock_guard lock(client_.mutex_);
  client_.in_flight_.erase(number_);
}

// The reply, if necessary on a new connection; nothing at the deadline or after an interruption.
std::optional<Reply> StoreClient::ask(const Request& request, const Deadline& deadline,
                                      std::chrono::milliseconds slack) {
  const Deadline answer_by(deadline.left() + slack);
  std::chrono::nanoseconds silence = kSilence;
  for (int lost = 0;;) {
    std::optional<ServerConnection> connection = pool_.take(deadline);
    if (!connection) return std::nullopt;
    const bool last = answer_by.left() <= silence;
    std::optional<Reply> answer;
    try {
      answer = connection->exchange(request, last ? answer_by : Deadline(silence));
    } catch (const PeerLost& error) {  // try another connection
      pool_.give_back(std::nullopt);
      if (++lost == kMostLost)
        throw PeerLost("lost the store at " + wait_.server() + ": " + error.what());
      continue;
    } catch (...) {  // this connection is closed
      pool_.give_back(std::nullopt);
      throw;
    }
    const bool over = answer || last || wait_.is_interrupted();
    if (!over || !connection->is_usable()) connection.reset();
    pool_.give_back(std::move(connection));
    if (over) return answer;
    silence *= 2;
  }
}

// The reply to a request that changes a key.
Reply StoreClient::change(Request request, const Deadline& deadline) {
  const InFlight in_flight(*this, request);
  auto reply = ask(request, deadline);
  if (!reply) {
    wait_.check_interrupted();
    throw_unchanged(request.key, deadline, wait_.server());
  }
  if (reply->status == Status::full)
    throw InvalidArgument("the store at " + wait_.server() + " is full: it holds at most " +
                          std::to_string(store_frame::kMaxStoreBytes) + " bytes");
  if (reply->status == Status::refused) throw InvalidArgument(reply->value);
  return std::move(*reply);
}

void StoreClient::set(const std::string& key, const std::string& value, const Deadline& deadline) {
  check_sizes(key, value);
  change({Verb::set, 0, key, value}, deadline);
}

std::string StoreClient::get(const std::string& key, const Deadline& deadline) {
  check_sizes(key, "");
  do {
    const auto wait = std::min<std::chrono::nanoseconds>(deadline.left(), kLongestWait);
    const auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
    auto reply = ask({Verb::get, static_cast<uint32_t>(wait_ms), key, ""}, deadline, kAnswerSlack);
    if (reply && reply->status == Status::ok) return std::move(reply->value);
    if (!reply) wait_.check_interrupted();
  } while (!deadline.expired());
  throw_key_timeout(key, deadline, "the store at " + wait_.server());
}

int64_t StoreClient::add(const std::string& key, int64_t amount, const Deadline& deadline) {
  check_sizes(key, "");
  const Reply reply = change({Verb::add, 0, key, std::to_string(amount)}, deadline);
  int64_t sum = 0;
  const char* end = reply.value.data() + reply.value.size();
  const auto parsed = std::from_chars(reply.value.data(), end, sum);
  check(parsed.ec == std::errc{} && parsed.ptr == end,
        "invalid reply to ADD from the store at " + wait_.server() + ": '" + reply.value + "'");
  return sum;
}

std::optional<std::string> StoreClient::remove(const std::string& key, const Deadline& deadline) {
  check_sizes(key, "");
  Reply reply = change({Verb::remove, 0, key, ""}, deadline);
  if (reply.status != Status::ok) return std::nullopt;
  return std::move(reply.value);
}

std::string StoreClient::claim(const std::string& key, const std::string& value,
                               const Deadline& deadline) {
  check_sizes(key, value);
  return change({Verb::claim, 0, key, value}, deadline).value;
}

}  // namespace pycomm::rendezvous
