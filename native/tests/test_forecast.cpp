// What is to land before a guard comes, from what was measured before.
#include "check.hpp"
#include "forecast.hpp"

namespace {

constexpr auto kHost = zs::cuda::Way::to_host;
constexpr auto kPeer = zs::cuda::Way::to_peer;
constexpr size_t kAll = 500;

void nothing_is_moved_for_nothing() {
  zs::Forecast forecast;
  CHECK(forecast.in_time(kHost, kAll) == kAll);
  forecast.landed(kHost, kAll, 0.160);
  CHECK(forecast.in_time(kHost, kAll) == kAll);  // when its guard comes is not known
  forecast.guarded(0.128, 0);
  CHECK(forecast.in_time(kHost, kAll) == 392);  // 400, less a margin
  CHECK(forecast.in_time(kPeer, kAll) == kAll);
  forecast.landed(kPeer, 15, 0.001);  // too few to tell
  CHECK(forecast.in_time(kHost, kAll) == 392);
  forecast.guarded(1, 0);
  CHECK(forecast.in_time(kHost, kAll) == kAll);
  forecast.guarded(0.001, 0);
  CHECK(forecast.in_time(kHost, kAll) == 0);
}

void what_was_waited_for_is_not_relied_on_the_next_time() {
  zs::Forecast forecast;
  forecast.landed(kHost, kAll, 0.160);
  forecast.guarded(0.128, 0.008);  // 25 parts too many
  CHECK(forecast.in_time(kHost, kAll) == 367);
  forecast.guarded(0.128, 0.00005);
  CHECK(forecast.in_time(kHost, kAll) == 368);
  forecast.guarded(0.128, 0.0016);
  CHECK(forecast.in_time(kHost, kAll) == 363);
  for (int k = 0; k < 100; ++k) forecast.guarded(0.128, 0);
  CHECK(forecast.in_time(kHost, kAll) == 392);
}

// Drains of which every other one is 5 % slower: soon none is waited for.
void a_rate_that_varies_makes_no_waits() {
  zs::Forecast forecast;
  double waits[40] = {};
  for (int k = 0; k < 40; ++k) {
    const double part = 0.160 / kAll * (k % 2 == 0 ? 1.0 : 1.05);
    const size_t awaited = forecast.in_time(kHost, kAll);
    const double free = 0.148, waited = static_cast<double>(awaited) * part - free;
    waits[k] = waited > 0 ? waited : 0;
    forecast.landed(kHost, kAll, kAll * part);
    forecast.guarded(free, waits[k]);
  }
  double late = 0;
  for (int k = 20; k < 40; ++k) late += waits[k];
  CHECK(waits[0] > 0.010 && late / 20 < 0.001);
}

}  // namespace

int main() {
  nothing_is_moved_for_nothing();
  what_was_waited_for_is_not_relied_on_the_next_time();
  a_rate_that_varies_makes_no_waits();
  return 0;
}
