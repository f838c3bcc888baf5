/* The arithmetic of a decision, as numbers: what a worker's load is, and what each costs. */
#ifndef KVSTEER_SURVEY_H
#define KVSTEER_SURVEY_H

#include <stdbool.h>
#include <stddef.h>

/* What a worker's record says (extproc.routing.load.loads.EndpointLoad and its Speed). */
typedef struct {
    double in_flight, backlog_tokens, backlog_at, lately_tokens, shared;
    double others, excess_tokens, asked_at; /* of its report, if there is one */
    double slowness, pace;
    bool is_even, has_report;
} WorkerRecord;

/* What holds for all of them. */
typedef struct {
    double now, rate, capacity_tokens, common_slowness, utilization_seconds, report_seconds;
} SurveyRules;

/* counts: whether the report still counts. */
typedef struct {
    double in_flight, backlog_tokens, others, utilization, age_seconds, slowness;
    bool counts;
} WorkerLoad;

/* Returns the load at a time: the queue shrinks as the worker computes, what was sent lately fades,
 * and so does what its report shows beyond the known requests. */
WorkerLoad survey_load(const WorkerRecord *record, const SurveyRules *rules);

/* From this utilization on, the delay of later requests counts in full. */
#define FULL_WEIGHT_UTILIZATION 0.25

/* If even the idlest worker has a queue, a token delays this many more requests for each second of
 * it, up to a maximum. */
#define WAITING_A_SECOND 1.0
#define MAX_WAITING 10.0

/* Returns how much a token delays later requests.
 *
 * utilization: u, 0 to 1, the mean of the fleet's workers. Each token delays later requests in
 * proportion to u / (1 - u). The weight is bounded, since u is a rough estimate, and lower at a low
 * u: one burst does not make a busy fleet. queued_seconds: how long the idlest worker's queue takes.
 * All requests within that time wait for each token, wherever they go. */
double survey_waiting(double utilization, double queued_seconds);

/* Returns what a worker costs if it holds nothing of a prompt, in tokens; extproc/routing/policies.py
 * says why. */
double survey_cost(const WorkerLoad *load, double uncached, double running);

#endif
