#include "survey.h"

#include <math.h>

WorkerLoad survey_load(const WorkerRecord *record, const SurveyRules *rules) {
    double slowness = record->is_even ? rules->common_slowness : record->slowness;
    double backlog = record->backlog_tokens, lately = record->lately_tokens;
    double passed = rules->now - record->backlog_at;
    if (passed > 0.0) {
        if (backlog != 0.0) {
            backlog -= passed * rules->rate * record->pace;
            if (backlog < 0.0) backlog = 0.0;
        }
        if (lately != 0.0) lately *= exp(-passed / rules->utilization_seconds);
    }
    WorkerLoad load = {record->in_flight, backlog, record->shared,
                       lately * slowness / rules->capacity_tokens, 0.0, slowness, false};
    if (!record->has_report) return load;
    double age = rules->now - record->asked_at;
    if (!(age > 0.0)) age = 0.0;
    double share = 1.0 - age / rules->report_seconds;
    if (share <= 0.0) return load;
    load.backlog_tokens += share * record->excess_tokens;
    load.others = record->shared + share * record->others;
    load.age_seconds = age;
    load.counts = true;
    return load;
}

double survey_waiting(double utilization, double queued_seconds) {
    double waiting = 1.0;
    if (utilization < 0.5) {
        waiting = utilization / (1.0 - utilization);
        if (utilization < FULL_WEIGHT_UTILIZATION) waiting *= utilization / FULL_WEIGHT_UTILIZATION;
    }
    if (queued_seconds > 0.0) {
        double more = WAITING_A_SECOND * queued_seconds;
        waiting += more < MAX_WAITING ? more : MAX_WAITING;
    }
    return waiting;
}

double survey_cost(const WorkerLoad *load, double uncached, double running) {
    return (uncached + load->backlog_tokens + running * (load->in_flight + load->others)) *
           load->slowness;
}
