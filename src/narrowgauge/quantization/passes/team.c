/* Shares a pass among the threads of torch's OpenMP, each of which calls `join_team` once. */

#include <stdint.h>

typedef struct {
  int (*pass)(const void *one, int64_t start, int64_t end);
  const void *one;
  int64_t units, parts, taken; /* parts: equal ranges of units; taken: how many have an owner */
  int32_t failed;
} Team;

/* Compute parts until all are taken, so the team may have any size. */
void join_team(Team *team) {
  int64_t part;
  while ((part = __atomic_fetch_add(&team->taken, 1, __ATOMIC_RELAXED)) < team->parts) {
    const int64_t start = team->units * part / team->parts, end = team->units * (part + 1) / team->parts;
    if (team->pass(team->one, start, end)) __atomic_store_n(&team->failed, 1, __ATOMIC_RELAXED);
  }
}
