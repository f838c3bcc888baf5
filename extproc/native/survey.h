/* The loads of compared workers, as numbers; extproc.routing.load.Loads.load is the formula. */
#ifndef KVSTEER_SURVEY_H
#define KVSTEER_SURVEY_H

#include <stdbool.h>
#include <stddef.h>

/* What a worker's record says (extproc.routing.load.EndpointLoad and its Speed). */
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

WorkerLoad survey_load(const WorkerRecord *record, const SurveyRules *rules);

/* As in extproc.routing.policies, whose affinity_of is the formula. */
#define FULL_WEIGHT_UTILIZATION 0.25
#define WAITING_A_SECOND 1.0
#define MAX_WAITING 10.0

/* Returns how much a token delays later requests: by the fleet's mean utilization, and by how long
 * the shortest queue takes. */
double survey_waiting(double utilization, double queued_seconds);

/* Returns what a worker costs if it holds nothing of a prompt, in tokens. */
double survey_cost(const WorkerLoad *load, double uncached, double running);

#endif
